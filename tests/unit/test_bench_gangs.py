"""How bench.gangs reads nvidia-smi's output and its own samples, and how a result is kept."""

import json

from bench import gang_figures, report_docs, run
from bench.provenance import describe_run

SMI = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
COUNTED = {
    "grants": 100, "charged_ns": 600_000_000, "lent_ns": 0, "held_ns": 0, "overdue": 0,
    "launches": 900, "waits": 3, "busy_ns": 500_000_000,
}  # fmt: skip


def gpu(index, routes, node=0):
    return {"index": index, "routes": routes, "numa_node": node}


def test_the_topology_of_nvidia_smi_is_read():
    assert gang_figures.read_topology(SMI) == {
        "ways": {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"},
        "nodes": {"0": 0, "1": 0, "2": 1},
    }


def test_a_topology_without_numa_nodes_and_an_empty_one_are_read():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNV18\t\t\t\tN/A\n"
    assert gang_figures.read_topology(text) == {"ways": {"0-1": "NV18"}, "nodes": {}}
    assert gang_figures.read_topology("") == {"ways": {}, "nodes": {}}


def test_the_governors_topology_has_the_same_form():
    routes = [
        {"to": 1, "nvlinks": 18, "pcie": "SYS"},
        {"to": 2, "nvlinks": 0, "pcie": "PHB"},
        {"to": 3, "nvlinks": 0, "pcie": None},
    ]
    back = [{"to": 0, "nvlinks": 18, "pcie": "SYS"}]
    assert gang_figures.own_topology([gpu(0, routes), gpu(1, back, None)]) == {
        "ways": {"0-1": "NV18", "0-2": "PHB", "0-3": "?"},
        "nodes": {"0": 0},
    }


def answer(**more):
    return {
        "iterations": 300, "seconds": 3.0, "longest_s": 0.02, "checked": 600, "wrong": 0,
        "alike": True, "checkpoints": [], "losses": [], "how": "NCCL", "transports": ["P2P/CUMEM"],
        **more,
    }  # fmt: skip


def parts():
    """Return a run's parts: a share of 40 % for 1 s, 0 % for 1 s, 20 % for 0.2 s, then 40 %."""
    work = [4000] * 100 + [0] * 100 + [2000] * 20 + [4000] * 180
    event = {"killed_ns": 1_000_000_000, "returned_ns": 2_000_000_000, "until_ns": 4_000_000_000}
    tenant = {
        "name": "job-1",
        "gpu": 0,
        "compute": 40,
        "work_us": work,
        "events": [event],
        "governor": {},
    }
    steady = {
        "name": "hog-2",
        "gpu": 0,
        "compute": 60,
        "work_us": [6000] * 100,
        "governor": COUNTED,
    }
    trained = answer(checkpoints=["a", "b", "x"], iterations=120)
    return {
        "topology": {
            "error": None, "took_s": 1.0, "own": {"ways": {"0-1": "NV18"}, "nodes": {}},
            "driver": {"ways": {"0-1": "SYS"}, "nodes": {}}, "check_text": "", "check_json": {},
        },
        "samples": {
            "error": None, "took_s": 1.0,
            "looks": [{"processes": 8, "failed": 1, "us": {
                "utilisation": [3.0, 1.0, 2.0], "list": [], "samples": [4.0], "look": [9.0]}}],
        },
        "native": {
            "error": None, "took_s": 9.0,
            "jobs": {"processes-train": {"answer": answer(checkpoints=["a", "b", "c", "d"]), "units_ns": []}},
        },
        "restart": {
            "error": None, "took_s": 9.0,
            "arms": {"train": {
                "seconds": 1.0,
                "jobs": [{"name": "job-1", "job": "processes-train", "compute": 40, "status": 0, "answer": trained}],
                "tenants": [tenant, steady],
            }},
        },
        "hogs": {"error": "PartError: hogs took more than 5 s", "took_s": 5.0, "trace": ["/a/path"], "outputs": {}},
    }  # fmt: skip


def test_a_share_is_restored_when_it_is_near_its_quota_again():
    told = gang_figures.summarise(parts())["restart"]["arms"]["train"]
    back, hog = told["tenants"]
    # A window of 100 ms has to be near 40 %, so all but two of its steps follow the 200 ms at 20 %.
    assert back["back_ms"] == [280.0]
    assert (back["second_s"], back["away_s"], back["charged"]) == ([40.0], [0.0], None)
    assert (hog["delivered"], hog["charged"], hog["error_1s"]) == (60.0, 60.0, 0.0)
    [job] = told["jobs"]
    assert (job["rate"], job["of_native"], job["same_as_native"]) == (40.0, 40.0, "2 of 3")


def test_a_job_that_gave_no_answer_has_no_figures():
    found = parts()
    found["restart"]["arms"]["train"]["jobs"][0] |= {"answer": {}, "status": 3}
    for tenant in found["restart"]["arms"]["train"]["tenants"]:
        tenant["work_us"] = []
    told = gang_figures.summarise(found)["restart"]["arms"]["train"]
    assert (told["jobs"][0]["rate"], told["jobs"][0]["iterations"]) == (0.0, None)
    assert told["tenants"][0]["back_ms"] == [None]
    assert told["tenants"][1]["delivered"] is None


def test_a_run_is_kept_and_has_a_section_of_the_page(tmp_path):
    report = {
        "run": describe_run(), "gpu": {"kind": "nvidia", "name": "NVIDIA H200", "driver": "580"},
        "generation": "580-1", "parts": parts(), "summary": gang_figures.summarise(parts()),
    }  # fmt: skip
    (tmp_path / "gangs.json").write_text(json.dumps(report))
    out = tmp_path / "kept.json"
    arguments = ["--suite", "gangs", "--from", str(tmp_path), "--out", str(out)]
    assert run.main(arguments) == 0
    kept = json.loads(out.read_text())
    assert run.result_name(kept).endswith("-gangs-nvidia-h200.json")
    assert "trace" not in kept["raw"]["parts"]["hogs"]
    text = report_docs.build_page({"x": kept}).text
    assert "Topology 0-1: NV18, NUMA nodes {}: nvidia-smi reports a different topology." in text
    assert "- hogs failed: PartError: hogs took more than 5 s" in text
    assert (
        "| restart, train | job-1 | 40.00 /s | 40.00 % | 0.02 s | 0 of 600 | 2 of 3 | yes |" in text
    )
    assert "| restart, train | job-1 | 0 | 40 % | 29.00 % |  |  | 280.00 | 40.00 |" in text
    assert "| 8 | utilisation | 1 us | 2 us | 3 us |" in text


def test_a_summary_that_does_not_follow_from_the_samples_is_not_kept(tmp_path, capsys):
    report = {"run": describe_run(), "gpu": {}, "generation": "", "parts": parts(), "summary": {}}
    (tmp_path / "gangs.json").write_text(json.dumps(report))
    assert (
        run.main(["--suite", "gangs", "--from", str(tmp_path), "--out", str(tmp_path / "x")]) == 1
    )
    assert "the samples do not give the figures" in capsys.readouterr().err
