"""Test the checks of the tables and types against NVIDIA's headers, made up and installed."""

import zipfile

import pytest

from tests.conftest import lack
from tools import cuda_abi, cuda_headers

HEADER = """\
#define CUDA_VERSION {version}
typedef int CUresult;
#define CUDAAPI
CUresult CUDAAPI cuInit(unsigned int Flags);
{more}
#if defined(__CUDA_API_VERSION_INTERNAL)
#endif
"""


@pytest.mark.parametrize("version", ["13.0", "13.1", "13.2", "13.3", "13.4", "13.5"])
def test_no_function_of_a_known_header_is_unknown_or_ungoverned(version):
    """To fix a failure, name the function in libcontrol/functions.toml, and add a row to
    libcontrol/api if it must be governed.
    """
    names = cuda_headers.read_declared()[version]
    assert names
    assert cuda_headers.faults_of_names(names, names) == []


def test_the_stored_names_are_those_of_the_installed_header():
    include = cuda_abi.packaged_include()
    if include is None:
        lack("needs cuda.h of nvidia-cuda-runtime 13.5")
    stored = frozenset().union(*cuda_headers.read_declared().values())
    assert cuda_headers.read_declarations(include / "cuda.h") == stored


def test_a_function_belongs_to_the_first_version_that_declares_it():
    later = {"13.10": frozenset({"cuA", "cuC", "cuD"}), "13.2": frozenset({"cuA", "cuC"})}
    names = cuda_headers.introduced(later, {"13.0": frozenset({"cuA", "cuB"})})
    assert list(names) == ["13.0", "13.2", "13.10"]
    assert names["13.2"] == {"cuC"}
    assert names["13.10"] == {"cuD"}


def test_written_names_can_be_read(tmp_path):
    names = {"13.0": frozenset(f"cuFunctionNumber{i}_ptsz" for i in range(50)), "13.1": frozenset()}
    path = tmp_path / "declared.toml"
    path.write_text(cuda_headers.write_declared(names))
    assert cuda_headers.read_declared(path) == names
    assert max(len(line) for line in path.read_text().splitlines()) <= 120


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with one version, whose header declares `more`; there is no other header."""
    monkeypatch.setattr(cuda_headers, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(cuda_abi, "packaged_include", lambda: None)
    monkeypatch.setattr(cuda_abi, "examine", lambda _: ([], ["all types"]))

    def serve(version, more):
        text = HEADER.format(
            version=int(version.split(".")[0]) * 1000 + 10 * int(version.split(".")[1]), more=more
        )

        def answer(command, *arguments, seconds):
            assert seconds > 0
            if command == "index":
                return f"nvidia-cuda-runtime ({version})\nAvailable versions: {version}, 13.0.96\n"
            assert command == "download"
            assert arguments[-1] == f"nvidia-cuda-runtime=={version}"
            wheel = f"{arguments[arguments.index('-d') + 1]}/nvidia_cuda_runtime-{version}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("nvidia/cu13/include/cuda.h", text)
            return ""

        monkeypatch.setattr(cuda_headers, "ask_registry", answer)

    return serve


def test_a_new_version_with_a_new_function_fails_with_its_name(registry, capsys):
    registry(
        "13.9.1", "CUresult CUDAAPI cuOfTomorrow(void);\nCUresult CUDAAPI cuMemAlloc_v9(void);"
    )
    assert cuda_headers.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "functions.toml does not name: cuOfTomorrow",
        "libcontrol/api does not hook: cuMemAlloc_v9",
        "declared.toml does not have: cuMemAlloc_v9 cuOfTomorrow",
        "compared with cuda.h 13.9: 3 functions; all types",
    ]


def test_without_a_registry_the_newest_header_at_hand_is_compared(registry, monkeypatch, capsys):
    registry("13.4.1", "")
    assert cuda_headers.main(["--check"]) == 0

    def silent(*_, **__):
        raise cuda_headers.RegistryError("Connection refused")

    monkeypatch.setattr(cuda_headers, "ask_registry", silent)
    assert cuda_headers.main(["--check"]) == 0
    said = " (the newest at hand, because a newer one could not be fetched: Connection refused)"
    assert capsys.readouterr().out.splitlines() == [
        "compared with cuda.h 13.4: 1 functions; all types",
        "compared with cuda.h 13.4: 1 functions; all types" + said,
    ]
    monkeypatch.setattr(cuda_headers, "KEPT", cuda_headers.KEPT / "none")
    assert cuda_headers.main(["--check"]) == 0
    assert capsys.readouterr().out == f"compared with the names of declared.toml{said}\n"
    assert cuda_headers.main([]) == 1  # there is no header to write the names from


# ---- types and prototypes ----


def test_the_types_and_prototypes_are_those_of_the_installed_header():
    """To fix a failure, edit libcontrol/cuda_abi*.h, libcontrol/api or simgpu/cuda_abi.h."""
    include = cuda_abi.packaged_include()
    if include is None:
        lack("needs cuda.h of nvidia-cuda-runtime 13.5")
    faults, said = cuda_abi.examine(include)
    assert faults == []
    assert said[0].startswith("libcontrol: ")
    # The comparison must not be empty: these numbers grow with the tables.
    ours = cuda_abi.read_control()
    assert len(ours.types) > 60
    assert len(ours.functions) > 280
    assert {"cuMemAlloc_v2", "cuMemAlloc", "cuEventRecord"} < set(ours.functions)


THEIRS = """
typedef unsigned long long CUdeviceptr;
typedef enum CUkind_enum { CU_KIND_A = 1, CU_KIND_B = 2 } CUkind;
typedef struct CUplace_st { CUkind type; union { int id; short half; }; } CUplace;
typedef struct CUprop_st { CUplace place; void *data; unsigned char small; unsigned char reserved[7]; } CUprop;
int cuTake(CUdeviceptr *p, unsigned long size, const CUprop *prop, CUkind kind);
"""


def compare(tmp_path, changes):
    """Compare THEIRS with itself after changes."""
    ours = THEIRS
    for old, new in changes:
        assert old in ours
        ours = ours.replace(old, new)
    found = []
    for name, text in ("ours", ours), ("theirs", THEIRS):
        (tmp_path / f"{name}.h").write_text(text)
        found.append(cuda_abi.compiled([f'"{tmp_path}/{name}.h"'], ["cuTake"], []))
    return cuda_abi.compare(*found)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("int id; short half;", "int id;")],
        [("CUkind type;", "int type;")],
        [("unsigned char reserved[7];", "char padding[7];")],
        [
            (
                "unsigned char small; unsigned char reserved[7];",
                "unsigned char small; char pad[3]; int reserved;",
            )
        ],
        [("const CUprop *prop", "const void *prop")],
        [("CUkind kind", "int kind")],
    ],
)
def test_declarations_that_mean_the_same_agree(tmp_path, changes):
    assert compare(tmp_path, changes) == ([], "4 types, 1 prototypes, 2 constants")


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            [("CUplace place; void *data;", "void *data; CUplace place;")],
            [
                "CUprop.data: 8 bytes at 0, in cuda.h 8 at 8",
                "CUprop.place: 8 bytes at 8, in cuda.h 8 at 0",
            ],
        ),
        ([("unsigned char small", "unsigned char tiny")], ["CUprop.tiny: not in cuda.h"]),
        (
            [("unsigned char small;", "unsigned short small;"), ("reserved[7]", "reserved[6]")],
            ["CUprop.small: 2 bytes at 16, in cuda.h 1 at 16"],
        ),
        (
            [("unsigned char reserved[7]", "unsigned char reserved[15]")],
            ["CUprop: 32 bytes, in cuda.h 24"],
        ),
        ([("CU_KIND_B = 2", "CU_KIND_B = 3")], ["CU_KIND_B is 3, in cuda.h 2"]),
        (
            [("unsigned long size", "unsigned int size")],
            ["cuTake: parameter 2 is number of 4, in cuda.h number of 8"],
        ),
        (
            [("CUdeviceptr *p,", "unsigned int *p,")],
            ["cuTake: parameter 1 is pointer to number of 4, in cuda.h pointer to number of 8"],
        ),
        ([(", CUkind kind)", ")")], ["cuTake: 3 parameters, in cuda.h 4"]),
        (
            [("CUdeviceptr *p,", "CUdeviceptr p,")],
            ["cuTake: parameter 1 is number of 8, in cuda.h pointer to number of 8"],
        ),
    ],
)
def test_a_declaration_that_differs_is_reported(tmp_path, changes, faults):
    assert compare(tmp_path, changes)[0] == faults


def test_a_name_that_the_header_lacks_is_reported():
    ours = cuda_abi.Declarations(
        functions={"cuOfOurs": cuda_abi.Type("function")}, constants={"CU_OURS": 1}
    )
    assert cuda_abi.missing(ours, cuda_abi.Declarations()) == ["CU_OURS", "cuOfOurs"]


def test_without_a_header_the_check_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(cuda_abi, "packaged_include", lambda: None)
    monkeypatch.setattr("sys.argv", ["cuda_abi"])
    assert cuda_abi.main() == 77
    assert "install nvidia-cuda-runtime" in capsys.readouterr().out
