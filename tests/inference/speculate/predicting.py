"""Models with layers for further tokens, and what transformers' blocks make of these."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from formats.families.predicting import UNDECLARED, Predicting
from formats.families.registry import BY_TYPE
from inference.engine import Engine
from tests.formats.families.test_glm4_moe import SIZES as GLM
from tests.inference.engines import drafting
from tests.ptq.quantizing import edit_model
from tests.tiny_families import DEEPSEEK

HIDDEN, LAST = 128, 1  # the last block; of models with a state, the one with full attention
KINDS = {"deepseek_v3": DEEPSEEK["v3"][1], "glm4_moe": GLM, "mimo": {}}  # and their sizes
STATEFUL = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def engine(folder, method: str | None = "mtp", path=None, **config) -> Engine:
    return drafting(folder, method, path, **{"max_model_len": 256, "max_batch_size": 4} | config)


def names_of(kind: str) -> Predicting:
    """Where a kind's first layer is, and what its parts are called."""
    own = BY_TYPE[kind].predicting if kind in BY_TYPE else UNDECLARED
    assert own is not None
    return own


def inside(names: Predicting) -> str:
    """What the names of a layer's decoder block begin with."""
    return f"{names.layer(2)}.{f'{names.block}.' * bool(names.block)}"


class Reference:
    """A model, and a random layer whose block is transformers' own.

    Attributes:
        names: Where the layer is, and what its parts are called.
        tensors: The layer's, by the names that they are published under.
    """

    def __init__(self, plain: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        own, inner = self.model.config, self.model.model
        torch.manual_seed(1)
        self.block = type(inner.layers[LAST])(own, LAST)  # of a mixture of experts, if there is one
        self.names = names = names_of(own.model_type)
        kinds = ("embedded_norm", "hidden_norm", "norm")
        self.norms = torch.nn.ModuleDict(
            {kind: type(inner.norm)(HIDDEN, own.rms_norm_eps) for kind in kinds}
        )
        self.joined = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        with torch.no_grad():
            for parameter in torch.nn.ModuleList(
                [self.block, self.norms, self.joined]
            ).parameters():
                drawn = 0.1 * torch.randn_like(parameter)
                scale = parameter.dim() == 1 and names is not UNDECLARED  # else it is added to 1
                parameter.copy_((scale + drawn).bfloat16())
        stacked = own.model_type == "qwen3_5_moe_text"  # as these are published
        block = self.block.state_dict() if stacked else _published(self.block)
        tensors = {inside(names) + name: tensor for name, tensor in block.items()}
        parts = {names.joined: self.joined}
        parts |= {getattr(names, kind): norm for kind, norm in self.norms.items()}
        tensors |= {f"{names.layer(2)}.{name}.weight": part.weight for name, part in parts.items()}
        assert any(t.dim() == 3 for t in tensors.values()) == stacked
        self.tensors = {k: t.detach().bfloat16().contiguous() for k, t in tensors.items()}

    @torch.no_grad()
    def check(self, text: list[int], drafts: list[int]) -> None:
        """Compare drafts after a text with what the layer says, of its own output."""
        model, count, names = self.model.model, len(text), self.names
        normed, last = self._outputs(text[:-1])
        features = normed if names.reads_normed else last
        embedded = model.embed_tokens(torch.tensor([[*text, *drafts][1:-1]]))
        for j, draft in enumerate(drafts):
            read = [
                self.norms["embedded_norm"](embedded[:, : count - 1 + j]),
                self.norms["hidden_norm"](features),
            ]
            x = self.joined(torch.cat(read[::-1] if names.hidden_first else read, dim=-1))
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
            turn = model.rotary_emb(x, places)
            y = self.block(x, attention_mask=mask, position_embeddings=turn, position_ids=places)
            y = y[0] if isinstance(y, tuple) else y
            after = self.norms["norm"](y)
            last = self.model.lm_head(after)[0, -1]
            assert int(last.argmax()) == draft or last.max() - last[draft] < 1e-3, (count, j)
            again = after if names is UNDECLARED else y
            features = torch.cat([features, again[:, -1:]], dim=1)

    def _outputs(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """The model's output after its last norm, and before it."""
        model, seen = self.model.model, []
        hook = model.norm.register_forward_pre_hook(lambda _, read: seen.append(read[0]))
        normed = model(torch.tensor([ids])).last_hidden_state
        hook.remove()
        return normed, seen[0]


def _published(block: torch.nn.Module) -> dict[str, Tensor]:
    """A block's tensors by the names of its files, which have each expert's of their own."""
    found = {}
    for name, tensor in block.state_dict().items():
        start, stack, kind = name.rpartition("experts.")
        if not stack or kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for i, own in enumerate(tensor):
            parts = own.chunk(2) if kind == "gate_up_proj" else [own]
            leaves = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            both = zip(leaves, parts, strict=True)
            found |= {f"{start}experts.{i}.{leaf}.weight": part for leaf, part in both}
    return found


def with_layer(plain: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a model with the tensors of a layer, which its configuration tells of."""
    edit_model(plain, out, lambda own: own.update(tensors))
    config = json.loads((out / "config.json").read_text())
    if config["model_type"] in BY_TYPE:
        config["num_nextn_predict_layers"] = 1
        (out / "config.json").write_text(json.dumps(config))
    return out


def write_predicting(tensors: dict[str, Tensor], kind: str, *, two: bool = True) -> None:
    """Add a layer that mostly knows the next token but one: blocks say little beside the embedding.

    The model's output follows its last token and a little of what came before; the layer reads the
    token after that, and its block is the model's last. A second one knows nothing.
    """
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.002
    names, block = names_of(kind), f"model.layers.{LAST}."
    layer = f"{names.layer(2)}."
    added = {k.replace(block, inside(names)): t.clone() for k, t in tensors.items() if block in k}
    embedding = tensors["model.embed_tokens.weight"].float()
    generator = torch.Generator().manual_seed(0)
    noise = 3e-5 * torch.randn(HIDDEN, HIDDEN, generator=generator)
    halves = [embedding.std() * torch.eye(HIDDEN), noise]
    joined = torch.cat(halves[::-1] if names.hidden_first else halves, dim=1)
    added[f"{layer}{names.joined}.weight"] = joined.bfloat16()
    for norm in (names.embedded_norm, names.hidden_norm):  # by 1; where it is added to 1, 0
        one = torch.full((HIDDEN,), float(names is not UNDECLARED))
        added[f"{layer}{norm}.weight"] = one.bfloat16()
    added[f"{layer}{names.norm}.weight"] = tensors["model.norm.weight"].clone()
    tensors |= added
    for name, tensor in added.items() if two else ():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        tensors[name.replace(layer, f"{second_layer(kind)}.")] = noise


def second_layer(kind: str) -> str:
    """Full name of the second of these layers."""
    return {"mimo": "model.mtp_layers.1"}.get(kind, "model.layers.3")


def write_knowing(plain: Path, out: Path) -> Path:
    """A copy of a model with a state, and with such a layer."""
    return edit_model(plain, out, lambda own: write_predicting(own, STATEFUL[0], two=False))
