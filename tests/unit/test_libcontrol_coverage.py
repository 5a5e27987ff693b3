"""Test the table of the driver API's functions against libraries that export them."""

import json
import subprocess

import pytest

from libcontrol import coverage
from libcontrol.api import CUDA
from tests.unit.test_vdriver_debian import alone, branch, driver_root  # noqa: F401 - fixtures
from tests.unit.vdriver_trees import put
from vdriver.discover import find_driver


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("cuMemAlloc_v2", "takes"),
        ("cuMemAllocAsync_ptsz", "takes"),
        ("cuMemFree_v2", "gives"),
        ("cuMemcpyDtoDAsync_v2_ptsz", "works"),
        ("cuMemcpyHtoD_v2_ptds", "transfers"),
        ("cuMemSetAccess", "plain"),
        ("cuMemsetD8_v2", "works"),
        ("cuGraphInstantiateWithParams_ptsz", "takes"),
        ("cuStreamGetCaptureInfo_v3", "plain"),
        ("cuMulticastCreate", "plain"),
        ("cuStreamBeginRecaptureToGraph_ptsz", "captures"),
        ("cuFabricCpyBatchAsync_ptsz", "works"),
        ("cuLogicalEndpointBindMem", "takes"),
        ("cuMemPrefetchAsync_v2_ptsz", "transfers"),
        ("cuMemAllocFromTheFuture", None),
        ("cuMemHostOfTheFuture", None),
    ],
)
def test_every_form_of_a_function_does_what_the_function_does(name, effect):
    assert coverage.effect_of(name, coverage.read_effects()) == effect


def test_every_hooked_function_is_known_and_none_is_listed_twice():
    effects = coverage.read_effects()
    assert {fn.name for fn in CUDA if coverage.effect_of(fn.name, effects) is None} == set()
    text = coverage.FUNCTIONS.read_text()
    named = [word for word in text.split('"') if word.startswith("cu")]
    assert sorted(named) == sorted(effects)


def test_an_ungoverned_or_unknown_function_is_reported(tmp_path, capsys):
    source = put(
        tmp_path / "a.c",
        b"void cuInit(void) {} void cuMemAlloc_v2(void) {} void cuMulticastBindMem_v9(void) {}\n"
        b"void cuOfTomorrow(void) {} void cuCtxGetCurrent(void) {} void other(void) {}\n",
    )
    made = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-nostdlib", source, "-o", made], check=True)
    assert coverage.main(["--driver", str(made)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "5 functions: 2 hooked, 1 forwarded, 1 ungoverned, 1 unknown",
        "ungoverned, takes: cuMulticastBindMem_v9",
        "unknown: cuOfTomorrow",
    ]
    assert coverage.main(["--driver", str(made), "--json"]) == 1
    functions = json.loads(capsys.readouterr().out)["functions"]
    assert [f["name"] for f in functions if f["ungoverned"]] == ["cuMulticastBindMem_v9"]
    assert coverage.main(["--driver", str(source)]) == 65
    assert "not an ELF file" in capsys.readouterr().err
    for option, file in (("--driver", "/bin/true"), ("--header", str(source))):
        assert coverage.main([option, file]) == 65
        assert "no function of the CUDA driver API" in capsys.readouterr().err


HEADER = """
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
    #define __CUDA_API_PTSZ(api) api ## _ptsz
#endif
#define cuMemAlloc                cuMemAlloc_v2
#define cuGraphInstantiate        cuGraphInstantiateWithFlags
#define cuMemcpyDtoD              __CUDA_API_PTDS(cuMemcpyDtoD_v2)
    #define cuStreamQuery         __CUDA_API_PTSZ(cuStreamQuery)
/** CUresult CUDAAPI cuOfAComment(void); */
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *graph);
CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr a, CUdeviceptr b, size_t n);
CUresult CUDAAPI cuStreamQuery(CUstream stream);
__CUDA_DEPRECATED CUresult CUDAAPI cuOfTomorrow(
    int a);
#if defined(__CUDA_API_VERSION_INTERNAL)
    #undef cuMemAlloc
    CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize);
#elif defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
static inline CUresult cuGetProcAddress_v2_ptsz(const char *symbol) { return 0; }
#endif
"""


def test_a_header_declares_each_form_that_a_driver_exports(tmp_path):
    header = tmp_path / "cuda.h"
    header.write_text(HEADER)
    assert coverage.read_declarations(header) == {
        "cuMemAlloc",
        "cuMemAlloc_v2",
        "cuGraphInstantiateWithFlags",
        "cuMemcpyDtoD_v2",
        "cuMemcpyDtoD_v2_ptds",
        "cuStreamQuery",
        "cuStreamQuery_ptsz",
        "cuOfTomorrow",
    }


def test_the_table_shows_the_method_of_each_function_of_a_header(tmp_path, capsys):
    header = tmp_path / "cuda.h"
    header.write_text(HEADER)
    assert coverage.main(["--header", str(header), "--table"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cuMemAlloc_v2", "takes", "charge"] in lines
    assert ["cuStreamQuery_ptsz", "plain", "forward"] in lines
    assert ["cuOfTomorrow", "unknown", "forward"] in lines
    header.write_text("CUresult CUDAAPI cuStreamQuery(CUstream stream);\n")
    assert coverage.main(["--header", str(header)]) == 0
    assert capsys.readouterr().out.startswith("1 functions: 0 hooked, 1 forwarded, 0 ungoverned")
    assert coverage.main(["--header", str(tmp_path / "none.h")]) == 66
    assert "none.h: No such file" in capsys.readouterr().err


def test_no_function_of_a_real_driver_is_unknown(driver_root):  # noqa: F811 - the fixture
    """To fix a failure, name the function in libcontrol/functions.toml, in the section of its effect."""
    driver = find_driver(driver_root)
    functions = coverage.cover(coverage.read_exports(driver.cuda.library.path))
    assert len(functions) > 250
    assert [f.name for f in functions if f.effect is None] == []
