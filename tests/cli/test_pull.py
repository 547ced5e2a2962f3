"""`quire pull` from a hub: what is checked before the download, and what `quire rm` deletes afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from quire.cli.doctor import Memory
from quire.cli.models import Download, find_problems
from quire.weights.hub import HubName
from tests.cli.fake_hub import COMMIT, FakeHub, Repository
from tests.cli.runs import quire
from tests.weights.makers import tiny_gguf, write_folder
from tests.weights.mlx_folder import write_mlx_model

GB = 10**9
MEMORY = Memory(cpu_total=16 * GB, cpu_free=12 * GB)
GGUF = tiny_gguf()


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, bytes]:
    """The files of a tiny model."""
    return {path.name: path.read_bytes() for path in write_folder(tmp_path / "made").iterdir()}


@pytest.fixture
def hub(folder: dict[str, bytes]) -> Iterator[FakeHub]:
    other = json.dumps({"architectures": ["MambaForCausalLM"]}).encode()
    sizes = {"huge-Q4_K_M.gguf": 900 * GB}
    with FakeHub(
        org_name=Repository(folder),
        org_other=Repository({**folder, "config.json": other}),
        org_gguf=Repository({"tiny-Q4_0.gguf": GGUF, "tiny-Q8_0.gguf": GGUF}, gguf={"architecture": "llama"}),
        org_mamba=Repository({"m-Q4_0.gguf": GGUF}, gguf={"architecture": "mamba"}),
        org_huge=Repository({"huge-Q4_K_M.gguf": b"x"}, sizes, {"architecture": "llama"}),
        org_pickle=Repository({"config.json": folder["config.json"], "pytorch_model.bin": b"x"}),
    ) as hub:
        yield hub


def pull(hub: FakeHub, home: Path, *arguments: str) -> CompletedProcess[str]:
    return quire("pull", *arguments, env=hub.env(home))


def test_a_model_that_runs_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    outcome = pull(hub, tmp_path, "org/name")
    assert outcome.returncode == 0, outcome.stderr
    path = Path(outcome.stdout.strip())
    assert (path.name, sorted(file.name for file in path.iterdir())) == (
        COMMIT,
        sorted(hub.repositories["org/name"].files),
    )
    assert outcome.stderr.startswith("org/name: ")
    assert outcome.stderr.endswith("tokens of context, runs on CPU\n")
    assert hub.fetched[0] == "config.json"  # before anything large
    again = pull(hub, tmp_path, "org/name")
    assert (again.stdout, again.stderr) == (outcome.stdout, "")  # it is here


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/other", "no equations for 'MambaForCausalLM'; `quire models --families` lists"),
        ("org/mamba:Q4_0", "architecture 'mamba' is not supported; these run: llama, "),
        ("org/huge:Q4_K_M", "it needs 900.0 GB, and "),
        ("org/huge:Q4_K_M", "its weights take 931 GiB, and this machine has "),
        ("org/pickle", "its weights are in a format that can run code when read"),
        ("org/gguf", "the repository has GGUF files: name one, as in `quire pull org/gguf:Q4_K_M`"),
        ("org/gguf:Q2_K", "no GGUF file of org/gguf matches 'Q2_K'; there are tiny-Q4_0.gguf, tiny-Q8_0.gguf"),
        ("org/nowhere", "no such model on the hub"),
    ],
)
def test_a_model_that_does_not_run_is_refused_before_the_download(
    hub: FakeHub, tmp_path: Path, name: str, message: str
) -> None:
    outcome = pull(hub, tmp_path, name)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert set(hub.fetched) <= {"config.json"}


# Models that only the mlx backend runs


@pytest.fixture
def mlx_hub(tmp_path: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in write_mlx_model(tmp_path / "made").iterdir()}
    unknown = json.dumps({**json.loads(files["config.json"]), "architectures": ["Bert"], "model_type": "bert"}).encode()
    with FakeHub(
        **{"mlx-community_Tiny-4bit": Repository(files), "org_bert": Repository({**files, "config.json": unknown})}
    ) as hub:
        yield hub


def test_a_packed_model_is_refused_with_the_backend_that_may_run_it(mlx_hub: FakeHub, tmp_path: Path) -> None:
    outcome = pull(mlx_hub, tmp_path, "mlx-community/Tiny-4bit")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert "quantization (bits 4): quantised safetensors are not supported" in outcome.stderr
    assert "The mlx backend may run it: --backend mlx. --force downloads it anyway" in outcome.stderr
    assert mlx_hub.fetched == ["config.json"]


@pytest.mark.nightly
def test_a_forced_packed_model_is_whole_and_named_with_its_problem(mlx_hub: FakeHub, tmp_path: Path) -> None:
    env = mlx_hub.env(tmp_path)
    outcome = pull(mlx_hub, tmp_path, "mlx-community/Tiny-4bit", "--force")
    assert outcome.returncode == 0, outcome.stderr
    path = Path(outcome.stdout.strip())
    assert {file.name for file in path.iterdir()} == set(mlx_hub.repositories["mlx-community/Tiny-4bit"].files)
    (model,) = json.loads(quire("models", "--json", env=env).stdout)["local"]
    assert (model["name"], model["quantization"]) == ("mlx-community/Tiny-4bit", "4 bits, groups of 32")
    assert model["architecture"] == "LlamaForCausalLM"
    assert "The mlx backend may run it: --backend mlx" in model["problem"]
    assert "mlx-community/Tiny-4bit: config.json: quantization (bits 4): " in quire("models", env=env).stdout
    shown = quire("show", "mlx-community/Tiny-4bit", env=env).stdout
    assert "runs here     no: " in shown
    assert "quantised safetensors are not supported" in shown
    report = json.loads(quire("doctor", "--json", env=env).stdout)
    assert any("mlx-community/Tiny-4bit cannot be opened" in one["what"] for one in report["problems"])


MAC = (
    "import sys\n"
    "import quire.backends.machine as machine\n"
    "machine.is_apple_silicon = lambda: True\n"
    "from quire.cli.main import run\n"
    "sys.argv[0] = 'quire'\n"
    "run()\n"
)


def on_a_mac(hub: FakeHub, home: Path, *arguments: str) -> CompletedProcess[str]:
    """Run a command that chooses the mlx backend."""
    command = [sys.executable, "-c", MAC, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | hub.env(home))


@pytest.mark.nightly
def test_where_mlx_is_chosen_a_packed_model_runs(mlx_hub: FakeHub, tmp_path: Path) -> None:
    name = "mlx-community/Tiny-4bit"
    outcome = on_a_mac(mlx_hub, tmp_path, "pull", name)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.endswith("4,096 tokens of context, runs on GPU, with mlx\n")
    lines = on_a_mac(mlx_hub, tmp_path, "models").stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    assert line.split()[1:7] == ["LlamaForCausalLM", "4", "bits,", "groups", "of", "32"]
    shown = on_a_mac(mlx_hub, tmp_path, "show", name).stdout
    assert "runs here     GPU, with mlx\n" in shown
    assert "quantisation  4 bits, groups of 32\n" in shown
    assert "parameters" not in shown  # the shapes of packed weights do not say how many there are
    assert (
        f"{name}, 0.1 MB, 4 bits, groups of 32 LlamaForCausalLM, opens" in on_a_mac(mlx_hub, tmp_path, "doctor").stdout
    )


@pytest.mark.nightly
def test_types_that_mlx_lm_does_not_have_are_refused(mlx_hub: FakeHub, tmp_path: Path) -> None:
    outcome = on_a_mac(mlx_hub, tmp_path, "pull", "org/bert")
    assert "org/bert: mlx-lm has no models of type 'bert'. --force downloads it anyway" in outcome.stderr
    assert outcome.returncode == 2


# What would be downloaded, without a hub


def download(name: str, files: dict[str, int], **more: object) -> Download:
    parsed = HubName.parse(name)
    assert parsed is not None
    given: dict[str, object] = {"others": (), "config": {}, "gguf": {}, **more}
    return Download(parsed, files, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K"),
        ("model.Q8_0.gguf", "Q8_0"),
        ("qwen2.5-coder-7b-instruct-q5_k_m.gguf", "Q5_K"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("m-UD-IQ2_M.gguf", "IQ2_S"),
        ("m-mxfp4.gguf", "MXFP4"),
        ("gemma-3-4b-it-BF16.gguf", "BF16"),
        ("m-fp16.gguf", "F16"),
        ("model.gguf", None),
    ],
)
def test_the_type_in_a_file_name(file: str, found: str | None) -> None:
    assert download("org/name:x.gguf", {file: 1}).type == found


def test_types_that_are_not_read_are_refused() -> None:
    (problem,) = find_problems(download("org/name:NVFP4", {"m-NVFP4.gguf": GB}), MEMORY, 100 * GB)
    assert problem.startswith("weights of type NVFP4 are not supported; these are: F32, ")
    for tag in ("Q4_K_M", "IQ4_XS", "IQ3_M", "Q2_K"):
        assert find_problems(download(f"org/name:{tag}", {f"m-{tag}.gguf": GB}), MEMORY, 100 * GB) == []


def test_a_gpu_holds_16_bits_and_a_cpu_5(folder: dict[str, bytes]) -> None:
    config = {**json.loads(folder["config.json"]), "torch_dtype": "bfloat16"}
    large = download("org/name", {"config.json": 1, "model.safetensors": 40 * GB}, config=config)
    assert "its weights take " in find_problems(large, MEMORY, 100 * GB)[0]
    assert find_problems(large, Memory(16 * GB, 12 * GB, 80 * GB, 70 * GB), 100 * GB) == []
    assert find_problems(large, Memory(64 * GB, 12 * GB), 100 * GB) == []  # in 8 bits
    assert "are free on the disk" in find_problems(large, Memory(64 * GB, 12 * GB), 10 * GB)[0]
    assert large.max_model_len == config["max_position_embeddings"]


def test_quantised_safetensors(folder: dict[str, bytes]) -> None:
    """A file of 4 bits has nearly four times the weights of one of 16 bits. Unknown methods are refused."""
    plain = json.loads(folder["config.json"])

    def look(**method: object) -> Download:
        config = {**plain, "quantization_config": method} if method else plain
        return download("org/name", {"config.json": 1, "model.safetensors": GB}, config=config)

    assert "quantised safetensors are not supported" in find_problems(look(quant_method="hqq"), MEMORY, 100 * GB)[0]
    four = look(quant_method="awq", bits=4, group_size=128)
    assert find_problems(four, MEMORY, 100 * GB) == []
    assert four.weights.counts == {"INT4": int(GB * 8 / 4.5)}
    assert look(quant_method="fp8", weight_block_size=[128, 128]).weights.counts == {"FP8": int(GB * 8 / 8.125)}


# quire rm


def test_rm_deletes_one_gguf_or_the_whole_repository(hub: FakeHub, tmp_path: Path) -> None:
    env = hub.env(tmp_path)
    first, second = (Path(pull(hub, tmp_path, f"org/gguf:{tag}").stdout.strip()) for tag in ("Q4_0", "Q8_0"))
    outcome = quire("rm", "org/gguf:Q4_0", env=env)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("quire: deleting org/gguf:Q4_0 (")
    assert outcome.stderr.endswith(" needs --yes: standard input is not a terminal\n")
    assert first.exists()
    outcome = quire("rm", "org/gguf:tiny-Q4_0.gguf", "--yes", env=env)
    assert outcome.stdout.startswith("deleted org/gguf:tiny-Q4_0.gguf: ")
    assert outcome.stdout.endswith(" freed\n")
    assert not first.is_symlink()
    home = first.parent.parent.parent
    quire("rm", "org/gguf", "--yes", env=env)
    assert not second.exists()
    assert not home.exists()
    assert "no such model on this machine" in quire("rm", "org/gguf", "--yes", env=env).stderr


def test_rm_refuses_what_quire_did_not_download(tmp_path: Path) -> None:
    own = tmp_path / "models"
    own.mkdir()
    (own / "mine.gguf").write_bytes(GGUF)
    (tmp_path / "x.gguf").write_bytes(GGUF)
    env = {"QUIRE_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "none")}
    for name, path in (("mine", own / "mine.gguf"), (str(tmp_path / "x.gguf"), tmp_path / "x.gguf")):
        outcome = quire("rm", name, "--yes", env=env)
        assert outcome.stderr == f"quire: {name}: quire did not download this model; delete {path} yourself\n"
        assert path.exists()
    assert "is not on this machine" in quire("rm", "smollm2", "--yes", env=env).stderr
