"""Test the generator: its output is committed, and an invalid row or field is an error."""

from __future__ import annotations

import pytest

from libcontrol import api, gen, layout

GATE = api.Fn("cuX", "CUfunction f, CUstream s", "gate", key="f", stream="s")
CHARGE = api.Fn("cuX", "CUdeviceptr *p, size_t n", "charge", size="n", pointer="*p")


def test_the_committed_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_file_is_named_and_left_alone(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gen, "HERE", tmp_path)
    assert gen.main([]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(gen.generate())
    assert gen.main(["--check"]) == 0
    (tmp_path / "layout.gen.h").write_text("/* changed by hand */\n")
    (tmp_path / "entries.gen.c").unlink()
    assert gen.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("stale: layout.gen.h, entries.gen.c;")
    assert (tmp_path / "layout.gen.h").read_text() == "/* changed by hand */\n"
    assert not (tmp_path / "entries.gen.c").exists()


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (GATE._replace(key=""), "cuX: .*key and stream"),
        (GATE._replace(stream=""), "cuX: .*key and stream"),
        (CHARGE._replace(size=""), "cuX: .*size and pointer"),
        (CHARGE._replace(pointer=""), "cuX: .*size and pointer"),
        (CHARGE._replace(method="refund", pointer=""), "cuX: .*pointer"),
        (GATE._replace(method="gated"), "cuX: unknown method gated"),
        (GATE._replace(method=""), "cuX: unknown method"),
    ],
)
def test_an_invalid_row_is_an_error(fn: api.Fn, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        gen.entry(fn)


def test_a_row_that_is_listed_twice_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(api, "CUDA", (*api.CUDA, api.CUDA[-1]))
    with pytest.raises(ValueError, match=f"listed twice: {api.CUDA[-1].name}"):
        gen.generate()


def test_every_parameter_is_passed_on() -> None:
    for fn in api.CUDA:
        if fn.method == "custom":
            continue
        names = [name for _, name in gen.split_parameters(fn.params)]
        assert f"real->{fn.name}({', '.join(names)});" in gen.entry(fn)


# Launches from before per-thread default streams existed.
OLD_LAUNCHES = {"cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync"}


def test_every_function_with_a_stream_has_a_form_for_the_per_thread_stream() -> None:
    rows = {fn.name: fn for fn in api.CUDA}
    for name, fn in rows.items():
        if fn.method == "gate" and not name.endswith("_ptsz") and name not in OLD_LAUNCHES:
            assert rows[f"{name}_ptsz"].stream == f"gate_ptsz({fn.stream})"


@pytest.mark.parametrize(
    ("struct", "says"),
    [
        (layout.Struct("s", 64, (layout.Field("a", "u32"), layout.Field("b", "u64")), ""), "s.b"),
        (layout.Struct("s", 16, (layout.Field("a", "u64", 3),), ""), "needs 24 bytes, has 16"),
    ],
)
def test_an_invalid_structure_is_an_error(struct: layout.Struct, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        layout.offsets(struct)
