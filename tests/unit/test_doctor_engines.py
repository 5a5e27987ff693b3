"""Test the findings of `tidegate doctor` about engines, hooks, CDI, and NVIDIA's toolkit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from governor.cdi import make_spec
from governor.doctor.engines import passes
from governor.quota import Device
from tests.unit.doctor_nodes import Host
from tests.unit.setup_tree import put_monitor, put_service

RUNTIME = "/usr/bin/tidegate-runtime"
HOOK = "/usr/bin/tidegate-hook"
VENDOR, LOCAL_DIR = "/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"
OWN = "/etc/tidegate/hooks.d"
LOCAL = "etc/tidegate/hooks.d/tidegate.json"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "root")
    for program in (RUNTIME, HOOK):
        host.put(program, "#!/usr/bin/python3 -ISE\n", 0o755)
    return host


def state(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_a_version_after_a_module_path_is_reported(host: Host) -> None:
    host.program(
        "usr/bin/containerd", "containerd github.com/containerd/containerd/v2 v2.3.4 3ef3c07\n"
    )
    assert host.check("containerd.version") == ["ok: /usr/bin/containerd, 2.3.4"]


@pytest.mark.parametrize("program", ["podman", "containerd", "crio", "nerdctl", "runc", "crun"])
def test_the_version_of_an_engine_is_reported(host: Host, program: str) -> None:
    check = f"{program}.version"
    assert host.check(check) == [f"note: {program} is not installed"]
    host.program(f"usr/bin/{program}", f"{program} version 1.2.3\n")
    assert host.check(check) == [f"ok: /usr/bin/{program}, 1.2.3"]
    del host.commands[program]
    assert host.check(check)[0].startswith(
        f"unseen: /usr/bin/{program} exists, but its version is not known: "
    )


def set_docker(host: Host, document: object) -> None:
    host.program("usr/bin/dockerd", "Docker version 26.1.5+dfsg1, build a72d7cd\n")
    host.json("etc/docker/daemon.json", document)


def set_running(host: Host, version: str = "26.1.5", **info: Any) -> None:
    host.program("usr/bin/docker", json.dumps({"ServerVersion": version, **info}))


def test_a_container_that_asks_by_a_label_is_named(host: Host) -> None:
    assert host.check("docker.labels") == ["note: Docker is not installed (docker)"]
    right = ["ok: no Docker container has a label under tidegate.gpu/"]
    host.program("usr/bin/docker", "one\t\ntwo\tcom.example=a,other.tidegate.gpu/x=1\n")
    assert host.check("docker.labels") == right
    host.program("usr/bin/docker", "one\t\ntrain-1\tx=1,tidegate.gpu/memory=4Gi,y=2\n")
    (said,) = host.check("docker.labels")
    assert said.startswith(
        "warning: Docker container train-1 has the label tidegate.gpu/memory, which no runtime"
    )
    assert "annotations: in the compose file" in said


DOCKER = {"runtimes": {"tidegate": {"path": RUNTIME}}}


def test_docker_that_has_the_runtime_is_right(host: Host) -> None:
    assert state(host.check("docker.runtime")) == ["note"]
    assert state(host.check("docker.version")) == ["note"]
    set_docker(host, DOCKER)
    right = [f"ok: Docker's runtime tidegate, {RUNTIME}"]
    assert host.check("docker.runtime") == right
    assert host.check("docker.version") == ["ok: Docker version 26.1.5+dfsg1, build a72d7cd"]
    set_running(host, Runtimes={"runc": {"path": "runc"}, "tidegate": {"path": RUNTIME}})
    assert host.check("docker.runtime") == right
    assert host.check("docker.version") == ["ok: dockerd 26.1.5 is running"]
    host.json("etc/docker/daemon.json", {})
    assert host.check("docker.runtime") == [
        *right,
        "note: dockerd has the runtime tidegate, which is not from /etc/docker/daemon.json",
    ]


def test_for_a_docker_that_is_not_set_up_the_setup_command_is_named(host: Host) -> None:
    set_docker(host, {"runtimes": {"other": {"path": "/usr/bin/other"}}})
    assert host.check("docker.runtime") == [
        "note: /etc/docker/daemon.json has no runtime tidegate -> tidegate setup docker"
    ]


def test_docker_that_has_not_read_its_file_again_is_wrong(host: Host) -> None:
    set_docker(host, DOCKER)
    set_running(host, Runtimes={"runc": {"path": "runc"}})
    assert host.check("docker.runtime") == [
        (
            "wrong: /etc/docker/daemon.json has the runtime tidegate, but dockerd has not read it yet"
            " -> systemctl reload docker"
        )
    ]


def test_a_checkouts_wrapper_that_adds_a_missing_hook_is_wrong(host: Host) -> None:
    own = "/opt/checkout/oci_hook"
    for name in ("tidegate-runtime", "tidegate-hook"):
        host.program(f"{own}/{name}")
    host.remove("usr/bin/tidegate-hook")
    runtime = {"path": f"{own}/tidegate-runtime"}
    set_docker(host, {"runtimes": {"tidegate": runtime}})
    assert host.check("docker.runtime") == [
        (
            f"wrong: Docker's runtime tidegate: {own}/tidegate-runtime adds the hook"
            f" /usr/bin/tidegate-hook, which is missing -> write `hook {own}/tidegate-hook` to /etc/tidegate/runtime"
        )
    ]
    right = [f"ok: Docker's runtime tidegate, {own}/tidegate-runtime"]
    # doctor does not check settings that an operator keeps elsewhere.
    elsewhere = {**runtime, "runtimeArgs": ["--tidegate-config", "/etc/other"]}
    set_docker(host, {"runtimes": {"tidegate": elsewhere}})
    assert host.check("docker.runtime") == right
    set_docker(host, {"runtimes": {"tidegate": runtime}})
    host.put("etc/tidegate/runtime", f"hook {own}/tidegate-hook\n")
    assert host.check("docker.runtime") == right


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"runtimes": {"tidegate": {"path": "tidegate-runtime"}}},
            "wrong: Docker's runtime tidegate runs 'tidegate-runtime', which is not an absolute path",
        ),
        (
            {"runtimes": {"tidegate": {"path": "/opt/tidegate-gone"}}},
            "wrong: Docker's runtime tidegate, /opt/tidegate-gone is missing",
        ),
        (
            {"runtimes": {"tidegate": {"path": 7}}},
            "wrong: Docker's runtime tidegate runs 7, which is not an absolute path",
        ),
        ({"runtimes": []}, "note: /etc/docker/daemon.json has no runtime tidegate"),
        ([], "wrong: /etc/docker/daemon.json is not a JSON object"),
    ],
)
def test_dockers_file_may_have_any_content(host: Host, document: object, said: str) -> None:
    set_docker(host, document)
    assert host.check("docker.runtime")[0].startswith(said)
    host.put("etc/docker/daemon.json", "{" * 100_000)
    assert host.check("docker.runtime")[0].startswith(
        "wrong: /etc/docker/daemon.json is not JSON: "
    )


def test_docker_before_24_is_a_warning_because_it_lacks_annotations(host: Host) -> None:
    set_docker(host, DOCKER)
    host.commands["dockerd"] = "Docker version 20.10.24+dfsg1, build 297e128\n"
    assert host.check("docker.version") == [
        (
            "warning: Docker version 20.10.24+dfsg1, build 297e128: docker run --annotation was introduced in 24.0"
            " -> install Docker 24 or newer, or write `environment allow` to /etc/tidegate/runtime"
        )
    ]
    host.put("etc/tidegate/runtime", "environment allow\n")
    assert host.check("docker.version")[0].startswith("note: Docker version 20.10.24")
    host.remove("etc/tidegate/runtime")
    set_running(host, "23.0.6")
    assert host.check("docker.version")[0].startswith("warning: dockerd 23.0.6 is running: ")
    set_running(host, "24.0.0")
    assert state(host.check("docker.version")) == ["ok"]


V2 = """
version = 2
{imports}
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
"""
V3 = V2.replace("version = 2", "version = 3").replace(
    "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
)
HANDLER = """
[plugins."{plugin}".containerd.runtimes.tidegate]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["tidegate.gpu/*"]
container_annotations = ["tidegate.gpu/*"]
[plugins."{plugin}".containerd.runtimes.tidegate.options]
BinaryName = "/usr/bin/tidegate-runtime"
"""
CONFIG = "etc/containerd/config.toml"
RIGHT = [f"ok: /etc/containerd/config.toml: the handler tidegate, {RUNTIME}"]


@pytest.mark.parametrize(
    ("main", "plugin"), [(V2, "io.containerd.grpc.v1.cri"), (V3, "io.containerd.cri.v1.runtime")]
)
def test_containerd_that_has_the_handler_is_right(host: Host, main: str, plugin: str) -> None:
    assert state(host.check("containerd.handler")) == ["note"]
    host.put(CONFIG, main.format(imports=""))
    assert host.check("containerd.handler") == [
        "note: /etc/containerd/config.toml has no handler tidegate -> tidegate setup containerd"
    ]
    handler = HANDLER.format(plugin=plugin)
    host.put(CONFIG, main.format(imports="") + handler)
    assert host.check("containerd.handler") == RIGHT
    # The handler is in a file that the main one imports, by a relative or an absolute pattern.
    for imports in (
        'imports = ["conf.d/*.toml"]',
        'imports = ["/etc/containerd/conf.d/tide*.toml"]',
    ):
        host.put(CONFIG, main.format(imports=imports))
        host.put("etc/containerd/conf.d/tidegate.toml", handler)
        assert host.check("containerd.handler") == RIGHT
    # The configuration that containerd itself dumps takes precedence over the files.
    host.program("usr/bin/containerd", main.format(imports=""))
    assert state(host.check("containerd.handler")) == ["note"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'BinaryName = "/usr/bin/tidegate-runtime"',
            "",
            "wrong: {path}: the handler tidegate specifies no program",
        ),
        (
            "/usr/bin/tidegate-runtime",
            "/opt/tidegate-gone",
            "wrong: {path}: the handler tidegate, /opt/tidegate-gone is missing",
        ),
        (
            'pod_annotations = ["tidegate.gpu/*"]',
            "",
            'wrong: {path}: pod_annotations of the handler tidegate lack "tidegate.gpu/*": containers start, but without',
        ),
        (
            '"tidegate.gpu/*"',
            '"*"',
            "wrong: {path}: pod_annotations and container_annotations of the handler tidegate lack",
        ),
    ],
)
def test_a_handler_that_does_not_reach_the_hook_is_wrong(
    host: Host, old: str, new: str, said: str
) -> None:
    text = V2.format(imports="") + HANDLER.format(plugin="io.containerd.grpc.v1.cri")
    host.put(CONFIG, text.replace(old, new))
    assert host.check("containerd.handler")[-1].startswith(said.format(path=f"/{CONFIG}"))


def test_a_default_handler_that_an_import_removed_is_wrong(host: Host) -> None:
    """containerd 1.6.20 dumps this if a drop-in has only Tidegate's handler."""
    text = V2.format(imports="") + HANDLER.format(plugin="io.containerd.grpc.v1.cri")
    host.put(CONFIG, text)
    # The defaults are not in the file.
    assert host.check("containerd.handler") == RIGHT
    host.program("usr/bin/containerd", text)
    assert host.check("containerd.handler")[0].startswith(
        f"wrong: /{CONFIG}: the default handler runc is not among tidegate: containers that name no"
    )
    runc = '\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'
    host.program("usr/bin/containerd", text + runc)
    assert host.check("containerd.handler") == RIGHT


def test_a_base_spec_brings_the_hook_without_the_wrapper(host: Host) -> None:
    spec = "etc/containerd/tidegate-base-spec.json"
    handler = HANDLER.format(plugin="io.containerd.grpc.v1.cri").replace(
        'BinaryName = "/usr/bin/tidegate-runtime"', ""
    )
    line = f'runtime_type = "io.containerd.runc.v2"\nbase_runtime_spec = "/{spec}"'
    host.put(
        CONFIG,
        V2.format(imports="") + handler.replace('runtime_type = "io.containerd.runc.v2"', line),
    )
    what = f"/{CONFIG}: the handler tidegate"
    assert host.check("containerd.handler")[0].startswith(
        f"wrong: {what} has the base spec /{spec}, which is missing"
    )
    hook = {"path": HOOK, "args": ["tidegate-hook", "createRuntime"], "env": ["PATH=/usr/bin"]}
    host.json(spec, {"hooks": {"createRuntime": [hook]}})
    assert host.check("containerd.handler") == [f"ok: {what}, base spec /{spec}: {HOOK}"]
    host.json(spec, {"hooks": {"createRuntime": [{**hook, "env": []}]}})
    assert "a hook has no env" in host.check("containerd.handler")[1]
    host.json(spec, {"hooks": {"createRuntime": [{"path": "/usr/bin/other"}]}})
    assert host.check("containerd.handler")[0].startswith(f"wrong: {what} specifies no program")


def test_another_program_as_the_runtime_tidegate_is_wrong(host: Host) -> None:
    host.program("usr/sbin/runc")
    set_docker(host, {"runtimes": {"tidegate": {"path": "/usr/sbin/runc"}}})
    assert host.check("docker.runtime")[0].startswith(
        "wrong: Docker's runtime tidegate runs /usr/sbin/runc, which is not the wrapper tidegate-runtime"
    )


def test_a_containerd_without_cri_has_no_handlers(host: Host) -> None:
    """Docker's own package installs containerd like this."""
    host.put(CONFIG, 'disabled_plugins = ["cri"]\n')
    assert host.check("containerd.handler")[0].startswith(
        "note: /etc/containerd/config.toml disables CRI"
    )
    host.put(CONFIG, "version = [")
    assert host.check("containerd.handler")[0].startswith(
        "wrong: /etc/containerd/config.toml is not TOML: "
    )


@pytest.mark.parametrize(
    ("patterns", "through"),
    [
        (("tidegate.gpu/*",), True),
        (("tidegate.gpu/memory",), True),
        (("*/*",), True),
        (("*",), False),  # as in path.Match, a star ends at a slash
        (("tidegate.gpu*",), False),
        (("other/*",), False),
        ((), False),
        (("tidegate.gp[s-v]/*",), True),
        (("tidegate.gp[^u]/*",), False),
        (("tidegate.gp[^a]/*",), True),
        (("tidegate.gp[!u]/*",), True),  # not a negation: `!` or `u`
        (("tidegate.gp[!a]/*",), False),
    ],
)
def test_patterns_match_as_in_containerd(patterns: tuple[str, ...], *, through: bool) -> None:
    assert passes(patterns, "tidegate.gpu/memory") is through


def hook_file(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "version": "1.0.0",
        "hook": {
            "path": HOOK,
            "args": ["tidegate-hook", "createRuntime"],
            "env": ["PATH=/usr/bin"],
        },
        "when": {"annotations": {r"^tidegate\.gpu/": ".*"}},
        "stages": ["createRuntime", "precreate", "poststop"],
    }
    return {**document, **changes}


def test_hooks_of_tidegate_that_run_are_ok(host: Host) -> None:
    assert state(host.check("hooks.in-force")) == ["note"]
    host.json(LOCAL, hook_file())
    assert host.check("hooks.in-force") == [f"ok: /{LOCAL}: {HOOK}"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.1.0"}, f"wrong: /{LOCAL} has version '0.1.0', but only 1.0.0 is supported"),
        ({"hook": {"path": "tidegate-hook"}}, f"wrong: /{LOCAL}: hook.path is 'tidegate-hook'"),
        (
            {"hook": {"path": "/opt/tidegate-hook", "env": ["A=b"]}},
            f"wrong: /{LOCAL}: /opt/tidegate-hook is missing",
        ),
        ({"hook": {"path": HOOK}}, f"wrong: /{LOCAL}: hook.env is empty"),
        ({"stages": ["poststart"]}, f"wrong: /{LOCAL} names none of Tidegate's stages"),
        (
            {"when": {"annotations": {"^other/": ".*"}}},
            f"wrong: /{LOCAL}: `when` matches none of Tidegate's annotations",
        ),
        (
            {"when": {"annotations": {"(": ".*"}}},
            f"wrong: /{LOCAL}: `when` matches none of Tidegate's annotations",
        ),
    ],
)
def test_hooks_of_tidegate_that_do_not_run_are_wrong(
    host: Host, changes: dict[str, Any], said: str
) -> None:
    host.json(LOCAL, hook_file(**changes))
    assert host.check("hooks.in-force")[-1].startswith(said)


def test_hooks_of_other_programs_are_named(host: Host) -> None:
    host.json(
        "usr/share/containers/oci/hooks.d/50-other.json", hook_file(hook={"path": "/usr/bin/other"})
    )
    assert state(host.check("hooks.in-force")) == ["warning"]
    host.program("usr/bin/other")
    assert host.check("hooks.in-force") == [
        "note: /usr/share/containers/oci/hooks.d/50-other.json runs /usr/bin/other"
    ]
    host.put("etc/containers/oci/hooks.d/broken.json", "{")
    assert "wrong" in state(host.check("hooks.in-force"))


def test_podman_runs_the_hook_and_adds_devices(host: Host) -> None:
    assert host.check("podman.hooks") == ["note: podman is not installed"]
    host.program("usr/bin/podman")
    assert host.check("podman.hooks") == [
        "note: Podman has no Tidegate hook -> tidegate setup podman"
    ]
    host.json(LOCAL, hook_file())
    assert host.check("podman.hooks") == [
        f"wrong: by default, Podman looks for hooks in {VENDOR}, not in {OWN} -> tidegate setup podman"
    ]
    host.put(
        "etc/containers/containers.conf.d/50-tidegate.conf",
        f'[engine]\nhooks_dir = ["{VENDOR}", "{OWN}"]\n',
    )
    assert host.check("podman.hooks") == [f"ok: root's Podman runs /{LOCAL}"]
    host.json(LOCAL, hook_file(stages=["createRuntime"]))
    assert host.check("podman.hooks")[0].startswith(
        "warning: Podman runs the hook, but not at the stage precreate"
    )
    host.json(LOCAL, hook_file(stages=["createRuntime", "precreate"]))
    assert host.check("podman.hooks")[0].startswith(
        "warning: Podman runs the hook, but not at the stage poststop"
    )
    host.json(LOCAL, hook_file(stages=["precreate"]))
    assert state(host.check("podman.hooks")) == ["wrong"]


def test_podman_that_looks_elsewhere_for_hooks_is_wrong(host: Host) -> None:
    host.program("usr/bin/podman")
    host.json(LOCAL, hook_file())
    host.put("etc/containers/containers.conf", '[engine]\nhooks_dir = ["/opt/hooks"]\n')
    assert host.check("podman.hooks")[0].startswith(
        "wrong: /etc/containers/containers.conf makes Podman look for hooks in /opt/hooks, but Tidegate's is "
    )
    host.put(
        "etc/containers/containers.conf.d/a.conf",
        '[engine]\nhooks_dir = ["/etc/tidegate/hooks.d", {append = true}]\n',
    )
    assert state(host.check("podman.hooks")) == ["ok"]
    # `append` stays in force for the files that follow.
    host.put("etc/containers/containers.conf.d/b.conf", '[engine]\nhooks_dir = ["/opt/more"]\n')
    assert state(host.check("podman.hooks")) == ["ok"]
    host.put(
        "etc/containers/containers.conf.d/c.conf",
        '[engine]\nhooks_dir = ["/opt/more", {append = false}]\n',
    )
    assert state(host.check("podman.hooks")) == ["wrong"]
    host.put(
        "etc/containers/containers.conf.d/z.conf",
        '[engine]\nhooks_dir = ["/etc/tidegate/hooks.d"]\n',
    )
    assert state(host.check("podman.hooks")) == ["ok"]


def test_podman_is_queried_for_its_hook_directories(host: Host) -> None:
    """A file may set hooks_dir although this version of Podman does not read that file, or reads it differently."""
    host.json(LOCAL, hook_file())
    host.put("etc/containers/containers.conf", '[engine]\nhooks_dir = ["/opt/hooks"]\n')
    host.program(
        "usr/bin/podman",
        "Options:\n      --hooks-dir stringArray       Set the OCI hooks directory path (may be set multiple "
        f"times) (default [{VENDOR},{OWN}])\n      --log-level string\n",
    )
    assert host.check("podman.hooks") == [f"ok: root's Podman runs /{LOCAL}"]


def test_a_stage_that_buildah_does_not_know_is_wrong(host: Host) -> None:
    path = f"{LOCAL_DIR}/50-tidegate-devices.json"
    host.json(path, hook_file())
    assert state(host.check("hooks.stages")) == ["note"]
    host.program("usr/bin/podman")
    host.json(LOCAL, hook_file())
    assert host.check("hooks.stages") == [
        (
            f"wrong: {path} has the stage precreate, which Buildah does not support: `podman build` and `buildah run` fail"
            f" -> rm {path} && tidegate setup podman"
        )
    ]
    host.json(path, hook_file(stages=["createRuntime", "poststop"]))
    right = ["ok: Buildah supports the stages of all hooks that it reads"]
    assert host.check("hooks.stages") == right
    other = f"{VENDOR}/other.json"
    host.json(other, hook_file(hook={"path": "/usr/bin/other"}, stages=["precreate"]))
    [line] = host.check("hooks.stages")
    assert line.startswith(f"wrong: {other} has the stage precreate, ")
    assert line.endswith(
        " -> move it to another directory, and add that to hooks_dir in /etc/containers/containers.conf"
    )


def test_a_podman_service_that_started_before_the_setup_is_wrong(host: Host) -> None:
    assert host.check("podman.service") == ["note: no Podman API service is running"]
    put_service(host.root, 4711, unit=True)
    put_service(host.root, 4712, unit=False, age_s=-100)
    knows = "uses the configured hook directories"
    right = [f"ok: podman.service {knows}", f"ok: process 4712 (podman system service) {knows}"]
    assert host.check("podman.service") == right
    conf = "etc/containers/containers.conf.d/50-tidegate.conf"
    host.put(conf, f'[engine]\nhooks_dir = ["{OWN}"]\n')
    assert host.check("podman.service") == right  # Tidegate has no hook there
    host.json(LOCAL, hook_file())
    assert host.check("podman.service") == [
        (
            f"wrong: podman.service started before /{conf} was written: containers that it starts get no GPU and no "
            "quota -> systemctl restart podman.service    # containers keep running"
        ),
        right[1],
    ]


def test_a_container_that_podman_would_restart_without_the_hooks_is_a_warning(host: Host) -> None:
    put_monitor(host.root, 4711, "trainer", (VENDOR,), {"tidegate.gpu/memory": "4Gi"})
    none = ["note: no Podman API service is running"]
    assert host.check("podman.service") == none
    host.put("etc/containers/containers.conf", f'[engine]\nhooks_dir = ["{OWN}"]\n')
    host.json(LOCAL, hook_file())
    assert host.check("podman.service") == [
        (
            "warning: the container trainer was started before the hooks were set up: if it has a restart policy, "
            "Podman restarts it without a GPU and without a quota -> podman restart trainer"
        ),
        *none,
    ]


def test_crio_that_would_run_the_hook_twice_is_a_warning(host: Host) -> None:
    host.put(
        "etc/crio/crio.conf", f'[crio.runtime.runtimes.tidegate]\nruntime_path = "{RUNTIME}"\n'
    )
    host.json(LOCAL, hook_file())
    assert host.check("hooks.doubled") == ["ok: CRI-O does not run the hook twice"]
    host.json("usr/share/containers/oci/hooks.d/tidegate.json", hook_file())
    assert host.check("hooks.doubled")[0].startswith(
        "warning: CRI-O has the handler tidegate, and finds /usr/share/"
    )


def cdi(
    kind: str = "tidegate.gpu/shared",
    node: str = "/dev/nvidia0",
    *,
    env: bool = True,
    stages: tuple[str, ...] = ("createRuntime", "poststop"),
) -> dict[str, Any]:
    hook = {"path": HOOK, "args": [], **({"env": ["A=b"]} if env else {})}
    hooks = [{"hookName": name, **hook} for name in stages]
    device = {"name": "0", "containerEdits": {"deviceNodes": [{"path": node}]}}
    return {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [device],
        "containerEdits": {"hooks": hooks},
    }


def test_a_cdi_file_is_stale_where_its_devices_are_gone(host: Host) -> None:
    assert state(host.check("cdi.fresh")) == ["note"]
    host.json("etc/cdi/tidegate.json", cdi())
    assert host.check("cdi.fresh")[0] == (
        "wrong: /etc/cdi/tidegate.json is stale: /dev/nvidia0 is missing -> tidegate cdi generate --output /var/run/cdi/tidegate.json"
    )
    host.put("dev/nvidia0")
    assert host.check("cdi.fresh") == [
        f"ok: /etc/cdi/tidegate.json: {HOOK}",
        "ok: /etc/cdi/tidegate.json (tidegate.gpu/shared) names 1 device nodes",
    ]
    host.json("etc/cdi/tidegate.json", cdi(env=False))
    assert "a hook has no env" in host.check("cdi.fresh")[0]
    host.json("etc/cdi/tidegate.json", cdi(stages=("createRuntime",)))
    assert any("has no poststop hook" in line for line in host.check("cdi.fresh"))


def test_a_cdi_file_is_stale_where_it_lacks_a_gpu(host: Host) -> None:
    host.put("run/cdi/tidegate.yaml", json.dumps(cdi()))  # JSON is YAML
    host.put("dev/nvidia0")
    for minor in (0, 1):
        host.put(
            f"proc/driver/nvidia/gpus/0000:{minor}b:00.0/information", f"Device Minor: \t {minor}\n"
        )
    assert host.check("cdi.fresh")[-1] == (
        "warning: /run/cdi/tidegate.yaml is stale: it lacks /dev/nvidia1 -> tidegate cdi generate --output /var/run/cdi/tidegate.json"
    )
    host.put("run/cdi/tidegate.yaml", json.dumps(cdi("tidegate.gpu/claim")))
    assert host.check("cdi.fresh")[-1] == (
        "ok: /run/cdi/tidegate.yaml (tidegate.gpu/claim) names 1 device nodes"
    )


@pytest.mark.parametrize("text", ["{", "[1]", "kind: 7", "a: [", ""])
def test_an_invalid_cdi_file_is_a_warning(host: Host, text: str) -> None:
    host.put("etc/cdi/other.yaml", text)
    host.put("etc/cdi/other.json", text)
    assert state(host.check("cdi.fresh"))[:2] == ["warning", "warning"]
    assert state(host.check("nvidia.cdi")) == ["ok"]


def test_nvidias_runtime_as_a_default_is_a_warning(host: Host) -> None:
    right = ["ok: no engine has NVIDIA's runtime as its default"]
    assert host.check("nvidia.default-runtime") == right
    set_docker(host, {"default-runtime": "nvidia"})
    assert host.check("nvidia.default-runtime")[0].startswith(
        "warning: Docker has the default runtime nvidia: "
    )
    set_running(host, DefaultRuntime="runc")
    assert host.check("nvidia.default-runtime") == right
    table = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'
    host.put(CONFIG, V2.format(imports="").replace('"runc"', '"nvidia"') + table)
    host.put("etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n')
    assert state(host.check("nvidia.default-runtime")) == ["warning", "warning"]


# What `nvidia-ctk runtime configure --runtime=containerd --set-as-default` writes since toolkit
# 1.18.
NVIDIA_DROP_IN = """\
version = 3

[plugins]
  [plugins."io.containerd.cri.v1.runtime"]
    [plugins."io.containerd.cri.v1.runtime".containerd]
      default_runtime_name = "nvidia"

      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes]
        [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
          runtime_type = "io.containerd.runc.v2"

          [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]
            BinaryName = "/usr/bin/nvidia-container-runtime"
"""


@pytest.mark.parametrize("dumps", [True, False])
def test_the_remedy_names_containerds_drop_in_that_makes_nvidias_runtime_the_default(
    host: Host,
    dumps: bool,  # noqa: FBT001
) -> None:
    main = 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
    host.put(CONFIG, main)
    host.put("etc/containerd/conf.d/10-site.toml", "version = 3\n")
    host.put("etc/containerd/conf.d/99-nvidia.toml", NVIDIA_DROP_IN)
    if dumps:
        host.program("usr/bin/containerd", NVIDIA_DROP_IN)
    (said,) = host.check("nvidia.default-runtime")
    assert said.startswith("warning: /etc/containerd/config.toml has the default runtime nvidia: ")
    remedy = 'set default_runtime_name = "runc" in /etc/containerd/conf.d/99-nvidia.toml'
    assert said.endswith(f" -> {remedy}, restart containerd")


def test_the_remedy_names_crios_drop_in_that_makes_nvidias_runtime_the_default(host: Host) -> None:
    host.put("etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "crun"\n')
    host.put("etc/crio/crio.conf.d/10-crio.conf", "[crio.image]\n")
    host.put("etc/crio/crio.conf.d/99-nvidia.conf", '[crio.runtime]\ndefault_runtime = "nvidia"\n')
    assert host.check("nvidia.default-runtime")[0].endswith(
        " -> set default_runtime in /etc/crio/crio.conf.d/99-nvidia.conf, systemctl restart crio"
    )


def test_the_remedy_for_docker_distinguishes_its_file_and_its_command_line(host: Host) -> None:
    set_docker(host, {"default-runtime": "nvidia"})
    set_running(host, DefaultRuntime="nvidia")
    assert host.check("nvidia.default-runtime")[0].endswith(
        " -> remove default-runtime from /etc/docker/daemon.json, systemctl reload docker"
    )
    set_docker(host, {})
    assert host.check("nvidia.default-runtime")[0].endswith(
        " -> /etc/docker/daemon.json does not set it: remove --default-runtime from dockerd's "
        "command line (systemctl cat docker), systemctl restart docker"
    )


def test_nvidias_hook_is_a_warning(host: Host) -> None:
    assert host.check("nvidia.hook") == ["ok: no hook directory contains NVIDIA's hook"]
    path = "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"
    host.json(path, hook_file(hook={"path": "/usr/bin/nvidia-container-runtime-hook"}))
    assert host.check("nvidia.hook")[0].startswith(f"warning: /{path} is NVIDIA's hook: ")


def test_nvidias_devices_by_cdi_are_named(host: Host) -> None:
    assert host.check("nvidia.cdi") == ["ok: NVIDIA has no CDI file"]
    host.put("run/cdi/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert host.check("nvidia.cdi")[0].startswith(
        "note: /run/cdi/nvidia.yaml: a container that requests nvidia.com/gpu gets a GPU outside of all quotas"
    )


def test_nvidias_operator_and_device_plugin_are_reported(host: Host) -> None:
    assert host.check("nvidia.operator") == [
        "ok: this node has neither NVIDIA's device plugin nor its operator"
    ]
    host.put("run/nvidia/driver/usr/bin/nvidia-smi")
    host.put("run/nvidia/toolkit/toolkit.pid")
    assert state(host.check("nvidia.operator")) == ["note", "note"]
    host.put("var/lib/kubelet/device-plugins/nvidia-gpu.sock")
    assert state(host.check("nvidia.operator")) == ["warning", "note", "note"]


def test_one_engine_that_is_set_up_is_enough(host: Host) -> None:
    assert host.check("engine.any")[0].startswith("warning: no engine is set up for Tidegate: ")
    set_docker(host, DOCKER)
    assert host.check("engine.any") == ["ok: Tidegate is set up for Docker"]
    host.json(LOCAL, hook_file())
    host.json("etc/cdi/tidegate.json", cdi())
    assert host.check("engine.any") == [
        "ok: Tidegate is set up for Docker, engines that read oci-hooks(5), engines that support CDI"
    ]
    host.put("etc/docker/daemon.json", "{")  # reported by docker.runtime
    assert state(host.check("engine.any")) == ["ok"]


def test_the_file_that_cdi_generate_writes_is_ok(host: Host) -> None:
    simulated = Device(0, "GPU-a", "Tidegate Simulated GPU", 16 << 30)  # it has no device node
    host.json("run/cdi/tidegate.json", make_spec([simulated]))
    assert host.check("cdi.fresh") == [
        f"ok: /run/cdi/tidegate.json: {HOOK}",
        "ok: /run/cdi/tidegate.json (tidegate.gpu/shared) names 0 device nodes",
    ]
