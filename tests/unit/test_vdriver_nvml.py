"""Tests of vdriver.nvml with a compiled stand-in for NVML that gives the answers a test chooses."""

import subprocess

import pytest

from vdriver.errors import NvmlError
from vdriver.nvml import Ancestor, Gpu, Nvml, ProcessMemory, ProcessUse, Route, Topology

# The values are distinguishable: each GPU's memory is (index + 1) GiB.
FAKE = r"""
#include <stdio.h>
#include <string.h>
typedef struct { int index; } device;
static device gpus[2] = {{0}, {1}};
static int open_count;
int fake_open_count(void) { return open_count; }
int nvmlInitWithFlags(unsigned flags) { if (INIT) return INIT; open_count++; return 0; }
int nvmlShutdown(void) { open_count--; return 0; }
const char *nvmlErrorString(int e) { return e == 9 ? "Driver Not Loaded" : "an error"; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, "%s", VERSION); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device **d) { *d = &gpus[i]; return i < 2 ? 0 : 2; }
int nvmlDeviceGetHandleByUUID(const char *u, device **d) {
    *d = &gpus[u[4] - '0'];
    return strncmp(u, "GPU-", 4) ? 6 : 0;
}
int nvmlDeviceGetUUID(device *d, char *u, unsigned n) { snprintf(u, n, "GPU-%d", d->index); return 0; }
int nvmlDeviceGetName(device *d, char *u, unsigned n) { snprintf(u, n, "Fake %d", d->index); return 0; }
int nvmlDeviceGetMinorNumber(device *d, unsigned *m) { *m = 7; return d->index ? 3 : 0; }
int nvmlDeviceGetMemoryInfo(device *d, unsigned long long m[3]) {
    m[0] = (d->index + 1ULL) << 30; m[1] = 1; m[2] = 12345;
    return MEMORY;
}
struct process { unsigned pid; unsigned long long used; unsigned gi, ci; };
static int list(struct process *from, unsigned have, unsigned *n, struct process *to) {
    if (*n < have) { *n = have; return 7; }
    *n = have; memcpy(to, from, have * sizeof *to);
    return 0;
}
static struct process compute[] = {{30, 300, 0, 0}, {10, ~0ULL, 0, 0}, {20, ~0ULL, 0, 0}};
static struct process graphics[] = {{30, 300, 0, 0}, {20, 200, 0, 0}};
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *n, struct process *p) {
    return list(compute, d->index ? 0 : 3, n, p);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *n, struct process *p) {
    return d->index ? 3 : list(graphics, 2, n, p);
}
struct sample { unsigned pid; unsigned long long time; unsigned sm, mem, enc, dec; };
static struct sample samples[] = {{10, 1000, 97, 0, 0, 0}, {20, 1200, 3, 0, 0, 0}, {0, 1300, 5, 0, 0, 0}};
int nvmlDeviceGetProcessUtilization(device *d, struct sample *s, unsigned *n, unsigned long long last) {
    if (last >= 2000) return d->index ? 0 : 6;
    if (d->index) return 3;
    static int grown; /* one sample arrives between the query of their number and the next query */
    if (!s) { *n = grown ? 3 : 2; return 7; }
    if (*n < 3) { grown = 1; return 7; }
    memcpy(s, samples, sizeof samples);
    return 0;
}
#ifdef LINKS
/* What is at the end of each link: a PCI bus (0 the GPUs' neighbour, 1 and 2 the GPUs), S a switch, U unknown. */
struct pci { char old[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
static const char *links[2] = {LINKS};
int nvmlDeviceGetPciInfo_v3(device *d, struct pci *p) {
    memset(p, 0, sizeof *p); p->bus = d->index + 1;
    return 0;
}
int nvmlDeviceGetNvLinkState(device *d, unsigned link, int *on) {
    *on = link < strlen(links[d->index]) && links[d->index][link] != '-';
    return link < 18 ? 0 : 2;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device *d, unsigned link, struct pci *p) {
    char end = links[d->index][link];
    memset(p, 0, sizeof *p); p->bus = end >= '0' && end <= '9' ? end - '0' : 0xc0;
    return end == 'U' ? 3 : 0;
}
#ifdef TYPES
int nvmlDeviceGetNvLinkRemoteDeviceType(device *d, unsigned link, int *type) {
    char end = links[d->index][link];
    *type = end == 'S' ? 2 : end == 'U' ? 255 : 0;
    return 0;
}
#endif
int nvmlDeviceGetTopologyCommonAncestor(device *a, device *b, int *level) { *level = 30; return LEVEL; }
int nvmlDeviceGetMemoryAffinity(device *d, unsigned n, unsigned long *set, int scope) {
    memset(set, 0, n * sizeof *set); set[1] = d->index ? 4 : 3;
    return 0;
}
#endif
"""


@pytest.fixture
def build(tmp_path):
    def make(name, *options, version="1.0", init=0, memory=0):
        path = tmp_path / name
        command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", path]
        command += [f'-DVERSION="{version}"', f"-DINIT={init}", f"-DMEMORY={memory}", *options]
        subprocess.run(command, input=FAKE, text=True, check=True)
        return path

    return make


def test_the_properties_of_gpus(build):
    with Nvml(build("libnvidia-ml.so.1")) as nvml:
        assert nvml.gpus() == (
            Gpu(index=0, uuid="GPU-0", name="Fake 0", memory_total=1 << 30, minor=7),
            Gpu(index=1, uuid="GPU-1", name="Fake 1", memory_total=2 << 30, minor=None),
        )
        assert nvml.memory_used("GPU-1") == 12345


def test_the_memory_of_a_gpu_that_does_not_report_it_is_none(build):
    with Nvml(build("libnvidia-ml.so.1", memory=3)) as nvml:
        assert [g.memory_total for g in nvml.gpus()] == [None, None]
        assert nvml.memory_used("GPU-0") is None


def test_a_process_is_listed_once_and_its_memory_may_be_unknown(build):
    with Nvml(build("libnvidia-ml.so.1")) as nvml:
        assert nvml.processes("GPU-0") == (
            ProcessMemory(pid=10, used=None),
            ProcessMemory(pid=20, used=200),
            ProcessMemory(pid=30, used=300),
        )
        assert nvml.processes("GPU-1") == ()


def test_samples_are_of_processes_and_newer_than_the_given_time(build):
    with Nvml(build("libnvidia-ml.so.1")) as nvml:
        first, second = ProcessUse(10, 1000, 97), ProcessUse(20, 1200, 3)
        assert nvml.utilisation("GPU-0", 0) == (first, second)
        # The driver applies the time only approximately, so older samples that it returns are
        # dropped.
        assert nvml.utilisation("GPU-0", 1000) == (second,)


@pytest.mark.parametrize(
    ("uuid", "since"),
    [
        pytest.param("GPU-0", 2000, id="no process was active"),
        pytest.param("GPU-1", 2000, id="an answer without samples"),
        pytest.param("GPU-1", 0, id="not supported"),
    ],
)
def test_a_gpu_may_have_no_samples(build, uuid, since):
    with Nvml(build("libnvidia-ml.so.1")) as nvml:
        assert nvml.utilisation(uuid, since) == ()


def test_another_library_is_used_after_the_first_is_closed(build):
    one, two = build("one.so", version="1.0"), build("two.so", version="2.0")
    for path, version in ((one, "1.0"), (two, "2.0"), (one, "1.0")):
        with Nvml(path) as nvml:
            assert nvml.driver_version() == version


def test_the_same_library_may_be_open_twice_and_another_one_not(build):
    one, two = build("one.so"), build("two.so")
    with Nvml(one) as first:
        with Nvml(one) as second:
            assert second.driver_version() == "1.0"
            with (
                pytest.raises(NvmlError, match=r"open from .*one\.so, not from .*two\.so"),
                Nvml(two),
            ):
                pass
        assert first.driver_version() == "1.0"
    with Nvml(two):
        pass


def test_an_error_is_one_line_with_a_remedy_and_leaves_nothing_open(build):
    with (
        pytest.raises(NvmlError, match="Driver Not Loaded; load the kernel module"),
        Nvml(build("a.so", init=9)),
    ):
        pass
    with Nvml(build("b.so")) as nvml:
        assert len(nvml.gpus()) == 2
        with pytest.raises(NvmlError, match="GPU nonsense"):
            nvml.processes("nonsense")


def test_a_library_that_is_not_nvml_is_refused(tmp_path):
    with pytest.raises(NvmlError, match="cannot be loaded"), Nvml(tmp_path / "missing.so"):
        pass
    subprocess.run(
        ["gcc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "empty.so"], check=True
    )
    with pytest.raises(NvmlError, match="not an NVML library"), Nvml(tmp_path / "empty.so"):
        pass


def route_of(build, links, *options):
    """Return the route between the two GPUs of a stand-in whose NVLinks have these ends."""
    path = build("libnvidia-ml.so.1", f"-DLINKS={links}", "-DLEVEL=0", *options)
    with Nvml(path) as nvml:
        uuids = [gpu.uuid for gpu in nvml.gpus()]
        return nvml.topology(uuids).routes[frozenset(uuids)]


@pytest.mark.parametrize(
    ("links", "nvlinks"),
    [
        pytest.param('"22-2","111"', 3, id="to each other, one is down"),
        pytest.param('"22","1"', 2, id="one end does not report all"),
        pytest.param('"SSSS","SSS"', 3, id="through switches, as many as both have"),
        pytest.param('"UUUU","UUUU"', 4, id="to switches that a virtual machine does not see"),
        pytest.param('"2SS","1SS"', 3, id="both kinds"),
        pytest.param('"00","0"', 0, id="to a GPU of another node"),
        pytest.param('"SSSS",""', 0, id="one has none"),
        pytest.param('"",""', 0, id="none"),
    ],
)
def test_nvlinks_between_two_gpus_are_counted(build, links, nvlinks):
    assert route_of(build, links, "-DTYPES") == Route(nvlinks, Ancestor.PHB)


@pytest.mark.parametrize(("links", "nvlinks"), [('"222","111"', 3), ('"SS","SS"', 2)])
def test_links_are_counted_without_the_type_of_their_ends(build, links, nvlinks):
    assert route_of(build, links).nvlinks == nvlinks


def test_a_driver_without_these_functions_has_no_topology(build):
    with Nvml(build("libnvidia-ml.so.1")) as nvml:
        uuids = [gpu.uuid for gpu in nvml.gpus()]
        assert nvml.topology(uuids) == Topology({}, {frozenset(uuids): Route(0, None)})


@pytest.mark.parametrize("answer", [2, 3, 13, 15, 999])
def test_an_unknown_ancestor_is_none(build, answer):
    with Nvml(build("libnvidia-ml.so.1", '-DLINKS="2","1"', f"-DLEVEL={answer}")) as nvml:
        uuids = [gpu.uuid for gpu in nvml.gpus()]
        assert nvml.topology(uuids).routes == {frozenset(uuids): Route(1, None)}


def test_a_gpu_equally_near_to_two_numa_nodes_has_no_node(build):
    with Nvml(build("libnvidia-ml.so.1", '-DLINKS="",""', "-DLEVEL=0")) as nvml:
        # The first GPU is equally near to two nodes.
        assert nvml.topology(["GPU-0", "GPU-1"]).nodes == {"GPU-1": 66}
