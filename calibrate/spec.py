"""What a recipe says of its data and of its observers: read, and refused, without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from formats.scheme import Strict

Split = Literal["calibration", "evaluation"]
# local files by their suffix: those of text, and those of tables with the reader of `datasets`
TEXT = (".txt", ".md", ".py")
TABLES = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


class SplitSpec(Strict):
    """How much of a source is used.

    YAML: ``calibration: {samples: 64, sequence_length: 512, seed: 0}``
    """

    samples: int = Field(default=64, ge=1)
    sequence_length: int = Field(default=512, ge=2)
    seed: int = Field(default=0, ge=0, lt=2**63)


class DatasetSpec(Strict):
    """Text to calibrate on and to evaluate with.

    YAML::

        dataset:
          name: data/corpus.jsonl       # or `stdlib`, or a name for datasets.load_dataset
          column: text                  # or messages_column: messages, for chats
          calibration: {samples: 128}

    Attributes:
        name: Source; see the module's docstring. Relative paths start at the recipe's folder.
        config: Configuration of a `datasets` name.
        split: Split of a `datasets` name for calibration.
        evaluation_split: Its split for evaluation; default: other documents of `split`.
        evaluation_name: Another source for evaluation; default: other documents of `name`.
        column: Column of the text in tables.
        messages_column: Column of lists of {role, content} instead, rendered by the tokenizer's
            chat template.
        chat_template_kwargs: Variables for that template, such as `{enable_thinking: false}`.
        pack: Join documents with the end-of-text token and cut the stream into full sequences;
            otherwise one document a sequence, cut at its length and padded.
        calibration: Amount for calibration.
        evaluation: Amount for evaluation.
    """

    name: str = "stdlib"
    config: str | None = None
    split: str = "train"
    evaluation_split: str | None = None
    evaluation_name: str | None = None
    column: str = "text"
    messages_column: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    pack: bool = True
    calibration: SplitSpec = SplitSpec()
    evaluation: SplitSpec = SplitSpec()

    @model_validator(mode="after")
    def _consistent(self) -> DatasetSpec:
        if not self.name or self.evaluation_name == "":
            raise ValueError("a dataset's name must not be empty")
        if self.chat_template_kwargs and self.messages_column is None:
            raise ValueError("chat_template_kwargs need messages_column: no chat is rendered")
        return self


class ObserverSpec(Strict):
    """How a clipping range is chosen from what was observed.

    YAML: ``input: {method: percentile, percentile: 99.99}``

    `absmax` clips nothing; `averaged_absmax` is the mean of the samples' largest magnitudes;
    `percentile` keeps that share of the values; `mse` minimizes the squared error; `entropy`
    minimizes the KL divergence between the values and what int8 makes of them.
    """

    method: Literal["absmax", "averaged_absmax", "percentile", "mse", "entropy"] = "absmax"
    percentile: float = Field(default=99.99, gt=50, le=100)
