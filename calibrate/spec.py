"""What a recipe says of its data and of its observers: read, and refused, without torch."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from formats.scheme import Strict

SINK_INPUT: Final = "input_sink"  # role of sink tokens' rows, which are not among those of "input"
SINK_TOKENS: Final = 16  # ordinary tokens that the relative error of a sink token counts as
Split = Literal["calibration", "evaluation"]
# local files by their suffix: those of text, and those of tables
TEXT = (".txt", ".md", ".py")
TABLES = (".jsonl", ".parquet", ".arrow", ".csv", ".tsv", ".json")
NOT_READ = (".xlsx", ".gz", ".zst", ".zip")  # no name on the hub ends so, either


class SplitSpec(Strict):
    """How much of a source is used.

    YAML: ``calibration: {samples: 64, sequence_length: 512, seed: 0}``
    """

    samples: int = Field(default=64, ge=1)
    """Sequences. Time and the host memory of calibration grow in proportion; 64 to 512 are usual.
    Of an evaluation, noise falls with the square root.
    """
    sequence_length: int = Field(default=512, ge=2)
    """Tokens of a sequence. Choose what the model will meet; attention's time grows with the
    square.
    """
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Selects the sequences if the source has more than `samples`."""


class SourceSpec(Strict):
    """Another text that the report also measures.

    YAML: ``also: {name: data/chats.jsonl, messages_column: messages}``
    """

    name: str
    """Source, named as the dataset's."""
    config: str | None = None
    """Configuration of a `datasets` name."""
    split: str = "train"
    """Split of a `datasets` name."""
    column: str = "text"
    """Column of a table that holds the text."""
    messages_column: str | None = None
    """Column of chats instead; null reads `column`."""


class DatasetSpec(Strict):
    """Text to calibrate on and to evaluate with.

    YAML::

        dataset:
          name: data/corpus.jsonl       # or `stdlib`, or a name for datasets.load_dataset
          column: text                  # or messages_column: messages, for chats
          calibration: {samples: 128}
    """

    name: str = "stdlib"
    """Source: `stdlib` (source files of the Python at hand), a local .txt, .md, .py, .jsonl, .json,
    .csv, .tsv, .parquet or .arrow file or a folder of them, relative to the recipe's folder, or a
    name for `datasets.load_dataset`.
    """
    config: str | None = None
    """Configuration of a `datasets` name, such as `wikitext-2-raw-v1`."""
    split: str = "train"
    """Split of a `datasets` name that calibration reads."""
    evaluation_split: str | None = None
    """Its split for evaluation; null takes other documents of `split`."""
    evaluation_name: str | None = None
    """Another source for evaluation, named as `name`; null takes other documents of `name`."""
    column: str = "text"
    """Column of a table, or key of a JSON line, that holds the text."""
    messages_column: str | None = None
    """Column of chats instead, rendered by the tokenizer's chat template: lists of {role, content},
    or ShareGPT's {from, value}; null reads `column`.
    """
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Variables for that template, such as `{enable_thinking: false}`. Needs `messages_column`."""
    in_template: float = Field(default=0.25, ge=0, le=1)
    """For a model with a chat template and data without chats: the share of calibration sequences
    that present their text as chats in that template, as when the model is served. 0 turns it off.
    """
    also: SourceSpec | None = None
    """Text of another kind on which both models are also compared, such as chats in addition to
    prose. Null, for a model with a chat template and data without chats, is the data in the
    template.
    """
    pack: bool = True
    """Fill every sequence: text is joined with the end-of-text token and cut anywhere, after the
    BOS token of a tokenizer that has one; of chats a sequence begins with one and is filled with
    whole ones. Otherwise one document a sequence, cut at its length and padded.
    """
    fewer: bool = False
    """If the source has fewer samples, or none of full length, use what there is instead of
    refusing.
    """
    calibration: SplitSpec = SplitSpec()
    """How much is used to choose scales."""
    evaluation: SplitSpec = SplitSpec()
    """How much is used to compare the quantized model with the original; no document serves both.
    """

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
    """

    method: Literal["absmax", "averaged_absmax", "percentile", "mse", "entropy"] = "absmax"
    """`absmax` clips nothing; `averaged_absmax` takes the mean of the samples' largest magnitudes,
    for which one loud sample counts little; `percentile` keeps that share of the values; `mse`
    minimizes the squared error; `entropy` the KL divergence between the values and what int8 makes
    of them. All but the first two need histograms.
    """
    percentile: float = Field(default=99.99, gt=50, le=100)
    """Per cent of the magnitudes that are not clipped; read by `percentile` alone."""
