"""The manifests of packaging/kubernetes: Kubernetes accepts them, and every right that they grant is
used.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from governor import VERSION, daemon, metrics
from governor.config import Config, Metrics
from kube.cluster import CALLS, ApiRequest, Cluster
from kube.convert import DRIVER
from kube.resync import ANNOTATION
from tests.conftest import lack

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "packaging" / "kubernetes"
DIRECTORIES = ["base", *sorted(f"overlays/{path.name}" for path in (HERE / "overlays").iterdir())]
EXAMPLES = sorted((HERE / "examples").glob("*.yaml"))
SOURCES = [p for p in sorted(HERE.rglob("*.yaml")) if p.name not in {"kustomization.yaml", "config.yaml"}]  # fmt: skip
UNKNOWN = {"ServiceMonitor"}
"""Kinds that are not part of Kubernetes: their schemas come with the Prometheus operator."""


def validate(document: dict[str, Any]) -> None:
    if document["kind"] not in UNKNOWN:
        kubernetes_validate.validate(document, "1.36", strict=True)


def kubectl() -> str:
    built = ROOT / "build/kubectl/kubectl"
    found = str(built) if built.exists() else shutil.which("kubectl")
    if not found:
        lack("needs kubectl: tools/fetch-kubectl")
    return found


def render(directory: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [kubectl(), "kustomize", str(HERE / directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # warnings about deprecated fields would appear there
    return list(yaml.safe_load_all(done.stdout))


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]["template"]["spec"]
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_file_is_accepted_by_the_published_schemas(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        validate(document)


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_the_output_of_kustomize_is_accepted_and_complete(directory: str) -> None:
    documents = render(directory)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    for document in documents:
        validate(document)
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "tidegate"
    daemon_set = one(documents, "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounted = {m["name"] for c in containers(daemon_set) for m in c.get("volumeMounts", ())}
    assert volumes == mounted
    assert {c["image"] for c in containers(daemon_set)} == {"registry.example/tidegate:0.1.0"}
    for volume in spec["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_every_container_has_the_image_that_the_base_names(directory: str, tmp_path: Path) -> None:
    copy = tmp_path / "kubernetes"
    shutil.copytree(HERE, copy)
    base = copy / "base/kustomization.yaml"
    base.write_text(
        base.read_text().replace("registry.example/tidegate", "site.example/gpu/tidegate")
    )
    daemon_set = one(render(str(copy / directory)), "DaemonSet")
    images = {container["image"] for container in containers(daemon_set)}
    assert images == {f"site.example/gpu/tidegate:{VERSION}"}


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_a_pod_is_replaced_while_the_old_one_serves(directory: str) -> None:
    """No setting of a DaemonSet prevents two pods on a node. Only device plugins are replaced without
    overlap.
    """
    daemon_set = one(render(directory), "DaemonSet")
    rolling = daemon_set["spec"]["updateStrategy"]["rollingUpdate"]
    spec = daemon_set["spec"]["template"]["spec"]
    by_name = {container["name"]: container for container in spec["containers"]}
    if directory == "overlays/device-plugin":
        assert rolling == {"maxSurge": 0, "maxUnavailable": "10%"}
        return
    assert rolling == {"maxSurge": "10%", "maxUnavailable": 0}
    assert not spec.get("hostNetwork")
    ports = [port for c in containers(daemon_set) for port in c.get("ports") or ()]
    assert not any("hostPort" in port for port in ports)
    environment = {one["name"]: one["valueFrom"]["fieldRef"] for one in by_name["dra"]["env"]}
    assert environment["POD_UID"] == {"fieldPath": "metadata.uid"}
    # If the new pod's governor exited because the old one still runs, the kubelet would restart it late.
    if "governor" in by_name:
        assert by_name["governor"]["command"] == ["tidegate-governor", "--wait"]
        assert by_name["forkserver"]["args"][1:] == ["--wait"]
    from kube.service import HAND_OVER_S

    assert spec["terminationGracePeriodSeconds"] >= HAND_OVER_S + 10


def test_the_device_plugin_needs_nothing_from_the_api_server() -> None:
    documents = render("overlays/device-plugin")
    kinds = {document["kind"] for document in documents}
    assert kinds == {"Namespace", "ServiceAccount", "ConfigMap", "DaemonSet", "NetworkPolicy", "RuntimeClass"}  # fmt: skip
    spec = one(documents, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert not any("projected" in volume for volume in spec["volumes"])
    for container in containers(one(documents, "DaemonSet")):
        mounts = container.get("volumeMounts", ())
        assert not any("serviceaccount" in mount["mountPath"] for mount in mounts)


@pytest.mark.parametrize("directory", [d for d in DIRECTORIES if d != "overlays/device-plugin"])
def test_only_the_driver_has_a_token_and_it_reaches_no_socket_of_another(directory: str) -> None:
    """The other containers of the pod are privileged, run before the driver, or answer requests from the
    network.
    """
    daemon_set = one(render(directory), "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in containers(daemon_set):
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        tokens = [name for name in mounted if "projected" in volumes[name]]
        assert len(tokens) == (1 if container["name"] == "dra" else 0), container["name"]
        if container["name"] == "dra":
            below = [
                volumes[name]["hostPath"]["path"]
                for name in mounted
                if volumes[name].get("hostPath", {}).get("path", "").startswith("/var/lib/kubelet")
            ]
            assert sorted(below) == [
                "/var/lib/kubelet/plugins/tidegate.gpu",
                "/var/lib/kubelet/plugins_registry",
            ]


def test_a_stolen_token_cannot_offer_gpus_of_other_nodes_or_drivers() -> None:
    documents = list(yaml.safe_load_all((HERE / "base/own-node.yaml").read_text()))
    policy = one(documents, "ValidatingAdmissionPolicy")["spec"]
    assert policy["failurePolicy"] == "Fail"
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    assert rule["resources"] == ["resourceslices"]
    expressions = " ".join(validation["expression"] for validation in policy["validations"])
    for words in (
        'variables.caller != ""',
        "variables.whose == variables.caller",
        f'.spec.driver == "{DRIVER}"',
    ):
        assert words in expressions
    assert one(documents, "ValidatingAdmissionPolicyBinding")["spec"]["validationActions"] == [
        "Deny"
    ]


def test_a_stolen_token_can_change_only_one_annotation_of_pods() -> None:
    documents = list(yaml.safe_load_all((HERE / "base/resync.yaml").read_text()))
    policy = one(documents, "ValidatingAdmissionPolicy")["spec"]
    assert policy["failurePolicy"] == "Fail"
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pods/status"], ["UPDATE"])
    role = one(list(yaml.safe_load_all((HERE / "base/rbac.yaml").read_text())), "ClusterRole")
    writes = [
        rule
        for rule in role["rules"]
        if any(name.startswith("pods") for name in rule["resources"]) and rule["verbs"] != ["list"]
    ]
    assert writes == [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]
    expressions = " ".join(validation["expression"] for validation in policy["validations"])
    for words in (
        'object.spec.?nodeName.orValue("") == variables.caller',
        f'key == "{ANNOTATION}"',
        "object.?status == oldObject.?status",
    ):
        assert words in expressions
    binding = one(documents, "ValidatingAdmissionPolicyBinding")["spec"]
    assert (binding["policyName"], binding["validationActions"]) == ("tidegate-resync", ["Deny"])


def test_nodes_with_the_package_run_no_privileged_container() -> None:
    documents = render("overlays/installed-nodes")
    daemon_set = one(documents, "DaemonSet")
    assert [c["name"] for c in containers(daemon_set)] == ["dra"]
    assert not daemon_set["spec"]["template"]["spec"].get("hostPID")
    for container in containers(daemon_set):
        assert not container["securityContext"].get("privileged")
        assert "add" not in container["securityContext"]["capabilities"]


def test_the_fork_server_is_in_the_namespaces_of_the_hooks_that_it_serves(tmp_path: Path) -> None:
    """The fork server executes files that the init container has installed on the host, with the host's Python."""
    documents = render("base")
    daemon_set = one(documents, "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    by_name = {container["name"]: container for container in containers(daemon_set)}
    server, installs = by_name["forkserver"], by_name["install"]
    assert server["command"][:3] == ["nsenter", "--target", "1"]
    assert {"--mount", "--cgroup", "--net"} <= set(server["command"])
    assert spec["hostPID"] is True
    # Without --pid: with it, nsenter would remain the parent process, and would forward no signal.
    assert "--pid" not in server["command"]
    target = installs["command"][installs["command"].index("--to") + 1]
    program = Path(server["args"][0])
    made = tmp_path / "made"
    if os.geteuid() != 0:
        lack("needs root")  # for chroot
    assert install(made).returncode == 0
    path = made / program.relative_to(target)
    assert path.read_bytes() == (ROOT / "oci_hook/tidegate-forkserver").read_bytes()
    help_ = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    assert (help_.returncode, "[--wait]" in help_.stderr) == (2, True)
    # The server compares its version with that of a caller.
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import oci_hook.forkserver as f; print(f._version())"],
        cwd=made / "current/python", check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert version.stdout == f"{VERSION}\n"


def test_the_role_has_what_the_driver_calls_and_no_more() -> None:
    role = one(list(yaml.safe_load_all((HERE / "base/rbac.yaml").read_text())), "ClusterRole")
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    called = {(group, resource, verb) for group, resource, verbs in CALLS for verb in verbs}
    assert granted == called
    # CALLS is complete: it has what each request of the code needs.
    cluster = RecordingCluster()
    cluster.claim("team", "one")
    cluster.node("node-1")
    cluster.slice("node-1")
    cluster.create_slice({"metadata": {"name": "node-1"}})
    cluster.replace_slice({"metadata": {"name": "node-1"}})
    cluster.delete_slice("node-1")
    assert list(cluster.watch_slice("node-1", "7", 10)) == []
    cluster.create_event("team", {})
    cluster.pods("node-1")
    cluster.annotate_pod("team", "one", "uid", "key", "text")
    requests = (ROOT / "kube/cluster.py").read_text().count("ApiRequest(")
    assert len(cluster.sent) == requests
    assert {needed(one) for one in cluster.sent} == called


class RecordingCluster(Cluster):
    """A cluster that answers each request with an empty object."""

    def __init__(self) -> None:
        self.sent: list[ApiRequest] = []
        self._timeout = (1.0, 1.0)

    def _call(self, subject: str, request: ApiRequest, *, timeout: tuple[float, float]) -> Any:  # noqa: ARG002
        self.sent.append(request)
        return SimpleNamespace(data=b"{}", stream=lambda _: iter(()), close=lambda: None)


VERBS = {"POST": "create", "PUT": "update", "DELETE": "delete", "PATCH": "patch"}


def needed(request: ApiRequest) -> tuple[str, str, str]:
    """Return the group, the resource and the verb that a request needs."""
    path = request.path.removeprefix("/").replace("namespaces/{namespace}/", "").split("/")
    # api/VERSION/... or apis/GROUP/VERSION/...
    group, rest = ("", path[2:]) if path[0] == "api" else (path[1], path[3:])
    resource, is_named, below = rest[0], rest[1:2] == ["{name}"], rest[2:]
    verb = "watch" if "watch" in request.query else "get" if is_named else "list"
    return group, "/".join([resource, *below]), VERBS.get(request.method, verb)


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_each_termination_log_can_be_mounted(directory: str) -> None:
    """The kubelet mounts a file at its path; a volume that covers the path must be writable."""
    for container in containers(one(render(directory), "DaemonSet")):
        log = container.get("terminationMessagePath", "/dev/termination-log")
        mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", ())}
        over = [mounts[str(p)] for p in Path(log).parents if str(p) in mounts]
        assert not (over and over[0].get("readOnly")), container["name"]
        # The root file system is read-only; the only other writable directory is /dev, which the
        # runtime creates.
        assert over or log.startswith("/dev/"), container["name"]


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_every_container_drops_the_privileges_that_it_does_not_need(directory: str) -> None:
    for container in containers(one(render(directory), "DaemonSet")):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, container["name"]
        assert "limits" in container["resources"]
        if context.get("privileged"):
            assert container["name"] in ("governor", "forkserver")
            continue
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert set(context["capabilities"].get("add", [])) <= {"SYS_CHROOT", "DAC_OVERRIDE"}


@pytest.mark.parametrize("path", SOURCES + [HERE / d / "kustomization.yaml" for d in DIRECTORIES])
def test_every_privilege_is_explained_where_it_is_granted(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.search(
            r"privileged: true|runAsUser: 0|add: \[|hostPID: true|type: spc_t|enforce: priv", line
        ):
            before = lines[number - 1].strip()
            near = "#" in line or before.startswith("#") or "privileged: true" in before
            assert near, f"{path.name}:{number + 1}: {line.strip()}"


def test_parameters_of_classes_and_examples_are_accepted() -> None:
    from kube.parameters import Parameters, merge

    seen = {}
    for path in (HERE / "base/deviceclasses.yaml", *EXAMPLES):
        for document in yaml.safe_load_all(path.read_text()):
            for node in walk(document):
                if node.get("driver") == DRIVER and "parameters" in node:
                    name = document["metadata"]["name"]
                    seen[name] = merge(Parameters(), node["parameters"], name)
    assert seen["gpu-strict.tidegate.gpu"].compute_limit is None
    assert seen["gpu-elastic.tidegate.gpu"].compute_limit == 100
    assert seen["service"].compute_limit == 60


def walk(value: Any):
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_the_device_classes_are_those_that_the_code_names() -> None:
    from kube.names import CLASSES

    documents = list(yaml.safe_load_all((HERE / "base/deviceclasses.yaml").read_text()))
    assert {document["metadata"]["name"] for document in documents} == set(CLASSES)
    for path in EXAMPLES:
        for name in re.findall(r"deviceClassName: (\S+)", path.read_text()):
            assert name in CLASSES


def test_the_runtime_class_is_the_one_that_setup_prints() -> None:
    ours = yaml.safe_load((HERE / "base/runtimeclass.yaml").read_text())
    assert ours == yaml.safe_load((ROOT / "packaging/containerd/runtimeclass.yaml").read_text())


def test_the_configuration_is_accepted() -> None:
    from governor.config import parse_config

    assert parse_config((HERE / "base/config.yaml").read_text()).metrics.listen == "unix"


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_commands_accept_the_options_in_the_manifests(directory: str) -> None:
    for container in containers(one(render(directory), "DaemonSet")):
        command = container["command"]
        if command[:2] == ["python3", "-m"]:
            # With --help as last argument, the options before it are parsed and accepted first.
            subprocess.run(
                [sys.executable, "-m", *command[2:], "--help"],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
        elif command[0] == "tidegate":
            from governor.cli import parser

            parser((command[1],)).parse_args(command[1:])


def test_the_container_that_serves_the_network_reaches_only_the_metrics(tmp_path: Path) -> None:
    """The sidecar runs as user 65534 in group root, so it cannot connect to sockets that the governor
    creates for root only.
    """
    daemon_set = one(render("overlays/monitoring"), "DaemonSet")
    (sidecar,) = [c for c in containers(daemon_set) if c["name"] == "metrics"]
    user = sidecar["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["runAsNonRoot"]) == (65534, 0, True)
    assert user["capabilities"] == {"drop": ["ALL"]}
    if os.geteuid() != 0:
        lack("needs root")
    config = Config(runtime_dir=str(tmp_path), metrics=Metrics("unix"))
    tmp_path.chmod(0o755)
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(0); os.setuid(65534)\n"
        "for name in sys.argv[1:]: s = socket.socket(socket.AF_UNIX); print(s.connect_ex(name))\n"
    )
    with metrics.listening(config), daemon.listening(tmp_path / "governor.sock"):
        # The names are relative to the working directory, because other users cannot search pytest's
        # directories.
        done = subprocess.run(
            [sys.executable, "-c", program, "metrics.sock", "governor.sock"],
            cwd=tmp_path, check=True, capture_output=True, text=True,
        )  # fmt: skip
    assert [int(line) for line in done.stdout.split()] == [0, errno.EACCES]


def install(to: Path, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HERE / "install-node"), "--host", "/", "--to", str(to), "--from", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_hook_is_installed_on_the_node_and_an_upgrade_keeps_the_previous_one(
    tmp_path: Path,
) -> None:
    if os.geteuid() != 0:
        lack("needs root")  # for chroot
    to = tmp_path / "opt"
    assert install(to).returncode == 0
    first = (to / "current").resolve()
    hook = to / "bin/tidegate-hook"
    done = subprocess.run(
        [str(hook), "nonsense"], input="{}", capture_output=True, text=True, check=False
    )
    assert done.returncode == 70
    assert "tidegate" in done.stderr
    assert install(to).returncode == 0
    assert (to / "current").resolve() == first
    releases = [first]
    for number in range(2):
        newer = tmp_path / f"newer{number}"
        shutil.copytree(ROOT / "oci_hook", newer / "oci_hook")
        (newer / "governor").mkdir()
        shutil.copy(ROOT / "governor/__init__.py", newer / "governor")
        (newer / "oci_hook/main.py").write_text(
            f"# {number}\n" + (ROOT / "oci_hook/main.py").read_text()
        )
        assert install(to, newer).returncode == 0
        releases.append((to / "current").resolve())
    left = {path.name for path in (to / "versions").iterdir()}
    assert left == {release.name for release in releases[1:]}
    assert hook.resolve().is_file()
    assert not list(to.rglob("__pycache__"))


def test_an_image_without_a_hook_installs_nothing(tmp_path: Path) -> None:
    done = install(tmp_path / "opt", tmp_path)
    assert done.returncode == 1
    assert "has no hook" in done.stderr
    assert not (tmp_path / "opt").exists()


def test_files_that_the_image_copies_exist() -> None:
    text = (HERE / "Containerfile").read_text()
    for source in re.findall(r"^COPY (?!--from)(?:--\S+ )?(\S+) ", text, re.MULTILINE):
        if not source.startswith("build/"):
            assert (ROOT / source).is_file(), source
    assert "--require-hashes" in text


def test_a_cluster_gets_the_image_of_this_version() -> None:
    texts = {path: path.read_text() for path in HERE.rglob("*") if path.is_file()}
    tags = [tag for text in texts.values() for tag in re.findall(r"newTag: (\S+)", text)]
    assert tags
    assert {*tags} == {VERSION}
    assert f":{VERSION} " in texts[HERE / "Containerfile"]
