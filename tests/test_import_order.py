"""The plan of the house: which room stands on which, and that no import runs back down to up.

    ptq          text, output < methods < result, recipe < plan < pipeline, peers, evaluate < search
                 < report, convert < certify < api < sweep < commands
    inference    requests < scheduling < config < models < transformers_code < cpu, gpu < backend
                 < parallel, speculate, adapters < engine < bench, server
    calibrate    from a model and text to statistics
    formats      documents < scheme, families < published < modeling < stored < foreign < checkpoint
                 < gguf, adapters
    kernels      numerics, packed_cache < reference < cpu < ops < triton < bench

Each of the five packages imports those below it: `inference` stands beside `calibrate`, and only
`ptq` knows both. Inside a package, `FLOORS` lists its rooms from the ground up, a line a floor; a
room imports from the floors below its own, never from its own floor or those above. Imports inside
functions and in `later` count like all others; only those for type checkers do not.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "formats", "calibrate", "inference", "ptq")
ALLOWED = {
    "kernels": {"kernels"},
    "formats": {"formats"},
    "calibrate": {"calibrate", "formats", "kernels"},
    "inference": {"inference", "formats", "kernels"},
    "ptq": set(PACKAGES),
}
FLOORS = {
    "kernels": """
        numerics packed_cache op_inputs devices gumbel_noise
        two_level reference
        reference_attention
        cpu
        weights feedback logits
        ops triton
        cuda
        bench""",
    "kernels.cuda": """
        nvrtc attention
        block_weights
        fused_block""",
    "kernels.triton": """
        tuning gluon_names versions
        common reference
        sampling attention experts calibration
        fused
        linear collective recurrence norms
        convolution""",
    "formats": """
        errors
        files namespace memory pack chat_template
        documents command residual_rotation chat_tokens
        cache_scheme
        scheme scale_table families
        published
        hub modeling
        stored
        foreign tokenizer
        checkpoint
        gguf adapters""",
    "inference": """
        requests
        scheduling
        proposers
        config structured
        models
        transformers_code
        cpu gpu
        backend
        parallel speculate adapters
        accuracy engine prompts
        beam_search
        arguments rows
        predict chat bench
        server""",
    "inference.server": """
        settings messages logprobs
        schema
        tools
        stream
        open_requests
        engine_client arguments
        fleet vllm
        engine metrics
        http
        served_model
        call
        formatters
        routes
        serving
        command""",
    "ptq": """
        text output
        methods
        result recipe
        plan
        pipeline peers evaluate
        search
        report convert
        certify
        api
        sweep
        commands
        cli run check inspect time_quantizing
        completion
        __main__""",
}
UNTOLD = "requests scheduling models engine predict chat rows accuracy config".split()
"""Rooms of `inference` that compare no device with a name."""
CALIBRATE_MAY_USE = {
    "formats.chat_template",
    "formats.chat_tokens",
    "formats.errors",
    "formats.files",
    "formats.namespace",
    "formats.cache_scheme",
    "formats.scheme",
    "kernels.numerics",
    "kernels.packed_cache",
    "kernels.triton.calibration.magnitudes",
}


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= submodules or {module}
    return frozenset(found)


@cache
def modules() -> dict[str, Path]:
    """Files of our packages by module name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, files, strict=True)}


def sources(folder: str) -> dict[str, Path]:
    """Files below a folder of ours by module name."""
    prefix = folder.replace("/", ".")
    found = {n: p for n, p in modules().items() if n == prefix or n.startswith(f"{prefix}.")}
    assert found, f"no sources in {folder}"
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package):
    for path in sources(package).values():
        found = {name.split(".")[0] for name in imported_modules(path)} & set(PACKAGES)
        assert found <= ALLOWED[package], f"{path}: imports {found - ALLOWED[package]}"


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_from_the_floors_below(package):
    floors = [line.split() for line in FLOORS[package].strip().splitlines()]
    floor_of = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    depth = package.count(".") + 1
    for name, path in sources(package).items():
        if name == package or path.name == "__main__.py":  # doors open onto the highest floor
            continue
        room = name.split(".")[depth]
        assert room in floor_of, f"{path}: say in FLOORS on which floor of {package} {room} stands"
        for found in imported_modules(path):
            other = found.split(".")[depth] if found.startswith(f"{package}.") else room
            assert other == room or floor_of[other] < floor_of[room], f"{name} imports {found}"


def test_no_circle_of_imports():
    """Files are taken away whose imports are all gone; what stays is a circle, or stands on one."""
    left = {name: imported_modules(path) & modules().keys() for name, path in modules().items()}
    while free := {name for name, needs in left.items() if not needs & left.keys() - {name}}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left, sorted(left)


def test_calibrate_uses_only_vocabulary_and_numerics():
    rooms = ("formats.families", "formats.modeling")
    for path in sources("calibrate").values():
        ours = {n for n in imported_modules(path) if n.split(".")[0] in {"formats", "kernels"}}
        ours = {name for name in ours if not name.startswith(rooms)}
        assert ours <= CALIBRATE_MAY_USE, f"{path} imports {ours - CALIBRATE_MAY_USE}"


def test_what_methods_share_knows_no_method():
    for path in sources("ptq.methods.common").values():
        found = {n for n in imported_modules(path) if n.startswith("ptq.methods.")}
        assert all(n.startswith("ptq.methods.common") for n in found), f"{path}: {found}"


def test_quantizing_does_not_import_the_engine():
    allowed = {"inference.bench.peers.process"}  # what a recipe's peers are
    for room in ("methods", "recipe", "plan", "pipeline"):
        for path in sources(f"ptq.{room}").values():
            engine = {n for n in imported_modules(path) if n.startswith("inference")}
            assert engine <= allowed, f"{path} imports {engine - allowed}"


def test_only_what_is_the_gpus_imports_triton():
    for name, path in sources("inference").items():
        found = [n for n in imported_modules(path) if n.startswith(("kernels.triton", "triton"))]
        assert name.startswith(("inference.gpu", "inference.parallel.gpu")) or not found, path


def test_only_families_ask_for_a_model_type():
    """Others read the family's declaration; adapters run in processes that know nothing of ours."""
    for name, path in modules().items():
        if name.startswith("formats.families") or "adapters" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        if "model_type" in text:
            for node in ast.walk(ast.parse(text)):
                asks = isinstance(node, ast.Compare) and "model_type" in ast.unparse(node)
                assert not asks, f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_only_backends_ask_which_device_it_is():
    """A backend of ranks stands over a device's own, and has the GPUs' side beside that of CPUs."""
    asks = re.compile(r"device [!=]= |[!=]= \"(cuda|cpu)\"")
    rooms = ("cpu", "gpu", "backend", "parallel.backend", "parallel.gpu")
    for name, path in sources("inference").items():
        if name.startswith(tuple(f"inference.{room}" for room in rooms)):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            asked = isinstance(node, ast.Attribute) and (
                node.attr in ("is_cuda", "is_cpu", "triton")
                or (node.attr == "type" and "device" in ast.unparse(node.value))
            )
            assert not asked, f"{path}:{node.lineno}: {ast.unparse(node)}"
        untold = name.startswith(tuple(f"inference.{room}" for room in UNTOLD))
        assert not (untold and asks.search(text)), f"{path} asks for a device"


def test_what_runs_in_a_peers_interpreter_imports_nothing_of_ours():
    quantizers, runtimes = ROOT / "ptq/peers", ROOT / "inference/bench/peers"
    files = [runtimes / "child.py", runtimes / "run_loads.py"]
    files += [quantizers / "quantize_job.py", quantizers / "adapters.py"]
    files += (runtimes / "adapters").glob("*.py")
    assert len(files) == 7
    for path in files:
        assert not {name.split(".")[0] for name in imported_modules(path)} & set(PACKAGES), path


def test_only_modules_are_imported_later():
    """A class or function that `later` were to give could not be called."""
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.With) or ast.unparse(node.items[0]) != "later()":
                continue
            for statement in node.body:
                assert isinstance(statement, ast.Import | ast.ImportFrom), path
                ours = ast.unparse(statement).split()[1].split(".")[0] in PACKAGES
                if isinstance(statement, ast.ImportFrom) and ours:
                    named = {f"{statement.module}.{alias.name}" for alias in statement.names}
                    assert named <= modules().keys(), f"{path}: {named - modules().keys()}"


def test_kernels_is_imported_by_module_name():
    """`from kernels import ops` breaks where a foreign package owns the name."""
    for path in ROOT.rglob("*.py"):
        if ".venv" not in path.parts and "from kernels import" in (text := path.read_text("utf-8")):
            named = [n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
            assert "kernels" not in named, f"{path}: import the module by its name"


def test_kernels_has_no_init():
    assert not list((ROOT / "kernels").rglob("__init__.py"))
