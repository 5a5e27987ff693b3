"""From a manifest, a grant and an image to a plan, in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oci_hook import ldcache
from oci_hook.client import Grant
from oci_hook.errors import DriverError, ImageError, MirrorError
from oci_hook.image import Image
from oci_hook.manifest import check_fresh, choose_set, parse_manifest, read_manifest
from oci_hook.plan import BindDirectory, BindFile, WriteCache, plan_cache, plan_container

TARGET = "usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"
DOCUMENT = {
    "schema": 1,
    "generation": "580.159.04-0123456789ab",
    "driver": {"version": "580.159.04", "kind": "nvidia"},
    "machine": "x86_64",
    "sets": [{"capabilities": ["compute", "utility"], "lib64": "lib64", "bin": ["bin/nvidia-smi"]}],
    "files": [
        {"path": "lib64/libcuda.so.1", "role": "control", "soname": "libcuda.so.1"},
        {"path": "lib64/libcuda.so", "role": "link", "target": "libcuda.so.1"},
        {"path": "lib64/libcuda.so.580.159.04", "role": "link", "target": "libcuda.so.1"},
        {
            "path": "lib64/libnvidia-nvvm.so.580.159.04",
            "role": "library",
            "soname": "libnvidia-nvvm.so.4",
        },
        {
            "path": "lib64/libnvidia-nvvm.so.4",
            "role": "link",
            "target": "libnvidia-nvvm.so.580.159.04",
        },
        {"path": "lib64/libodd.so.580.159.04", "role": "library", "soname": "libodd.so.1"},
        {"path": "lib64/origin/libcuda-origin.so.1", "role": "origin", "soname": "libcuda.so.1"},
        {"path": "bin/nvidia-smi", "role": "program"},
    ],
    "source": {
        "root": "/",
        "watch": [{"path": "/usr/lib/libcuda.so.580.159.04", "size": 1, "mtime_ns": 2}],
    },
}
GENERATION = "/var/lib/tidegate/driver/580.159.04-0123456789ab"
MANIFEST = parse_manifest(json.dumps(DOCUMENT).encode(), GENERATION)
GRANT = Grant("k1", "/run/tidegate/containers/k1", ("GPU-x",), 1, 50)


def cache_of(**libraries: str) -> bytes:
    entries = tuple(ldcache.Entry(0x303, n.encode(), p.encode()) for n, p in libraries.items())
    return ldcache.write(ldcache.Cache(entries))


def test_the_sample_follows_the_schema() -> None:
    import jsonschema

    schema = json.loads(
        (Path(__file__).parents[2] / "vdriver" / "manifest.schema.json").read_text()
    )
    jsonschema.Draft202012Validator(schema).validate(DOCUMENT)


def test_a_plan_reads_as_an_operator_would_say_it() -> None:
    cache = cache_of(**{"libcuda.so.1": "/opt/cuda/libcuda.so.1"})
    plan = plan_container(
        MANIFEST, MANIFEST.sets[0], GRANT, Image("usr/lib/x86_64-linux-gnu", TARGET, cache)
    )
    assert plan.describe() == [
        f"bind {GENERATION}/lib64 -> /{TARGET} [ro,nosuid,nodev]",
        "bind /run/tidegate/containers/k1 -> /run/tidegate [ro,nosuid,nodev,noexec]",
        f"bind {GENERATION}/bin/nvidia-smi -> /usr/bin/nvidia-smi [ro,nosuid,nodev,file]",
        "write /etc/ld.so.cache [3 libraries, required]",
    ]


def test_sources_are_of_the_host_and_targets_of_the_container() -> None:
    plan = plan_container(MANIFEST, MANIFEST.sets[0], GRANT, Image("lib64", "lib64/tls", None))
    for operation in plan.operations:
        assert isinstance(operation, BindDirectory | BindFile)
        assert operation.source.startswith(
            ("/var/lib/tidegate/driver/", "/run/tidegate/containers/")
        )
        assert not operation.target.startswith("/")


def test_the_cache_gets_sonames_and_development_links_that_exist() -> None:
    assert MANIFEST.sets[0].sonames == ("libcuda.so", "libcuda.so.1", "libnvidia-nvvm.so.4")


def test_a_cache_that_says_it_already_is_left_alone() -> None:
    operation = plan_cache(cache_of(), TARGET, ("liba.so.1",))
    assert isinstance(operation, WriteCache)
    assert operation.strays == ()
    assert plan_cache(operation.content, TARGET, ("liba.so.1",)) is None


@pytest.mark.parametrize("cache", [None, b"", b"no cache", b"\x7fELF" * 100])
def test_what_a_loader_ignores_is_left_alone(cache: bytes | None) -> None:
    assert plan_cache(cache, TARGET, ("liba.so.1",)) is None


def test_a_damaged_cache_matters_only_if_it_names_ours() -> None:
    broken = ldcache.NEW_MAGIC + b"\xff" * 60
    assert plan_cache(broken, TARGET, ("liba.so.1",)) is None
    with pytest.raises(ImageError, match="is damaged"):
        plan_cache(broken + b"liba.so.1\0", TARGET, ("liba.so.1",))


def test_a_set_is_chosen_by_exactly_its_capabilities() -> None:
    assert choose_set(MANIFEST, ("compute", "utility")).lib64 == "lib64"
    with pytest.raises(DriverError, match="nothing for capabilities video, it has compute,utility"):
        choose_set(MANIFEST, ("video",))


def make_node(tmp_path: Path) -> Path:
    driver = tmp_path / "libcuda.so.580.159.04"
    driver.write_bytes(b"driver")
    stat = driver.stat()
    watch = [{"path": str(driver), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}]
    generation = tmp_path / "driver" / "580.159.04-0123456789ab"
    generation.mkdir(parents=True)
    (generation / "manifest.json").write_text(
        json.dumps({**DOCUMENT, "source": {"root": "/", "watch": watch}})
    )
    (generation.parent / "current").symlink_to(generation.name)
    return driver


def test_a_fresh_mirror_passes_and_a_changed_driver_does_not(tmp_path: Path) -> None:
    driver = make_node(tmp_path)
    manifest = read_manifest(str(tmp_path / "driver"))
    assert manifest.directory == str(tmp_path / "driver" / "580.159.04-0123456789ab")
    check_fresh(manifest)
    driver.write_bytes(b"newer driver")
    with pytest.raises(MirrorError, match=f"is stale: {driver} has changed"):
        check_fresh(manifest)
    driver.unlink()
    with pytest.raises(MirrorError, match=f"is stale: {driver}: No such file"):
        check_fresh(manifest)


def test_no_mirror_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DriverError) as caught:
        read_manifest(str(tmp_path))
    assert (
        caught.value.line()
        == f"tidegate: no driver mirror at {tmp_path}/current; run `tidegate refresh`"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"sets": None},
        {"sets": [{}]},
        {"sets": [{"capabilities": [], "lib64": "../../etc", "bin": []}]},
        {"sets": [{"capabilities": [], "lib64": "/etc", "bin": []}]},
        {"sets": [{"capabilities": [], "lib64": "lib64", "bin": ["bin/../../x"]}]},
        {"files": [{}]},
        {"source": {"watch": [{"path": "/x"}]}},
        {"driver": "x"},
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    make_node(tmp_path)
    path = tmp_path / "driver" / "current" / "manifest.json"
    path.write_text(json.dumps({**DOCUMENT, **change}))
    with pytest.raises(MirrorError, match="is not a manifest"):
        read_manifest(str(tmp_path / "driver"))
