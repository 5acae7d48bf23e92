"""Do the outputs stay the same? Logits of each way against DynamicCache's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pageforge.report.axis import Axis
from pageforge.report.figures import Figure, Record, failures, grouped, ran, same
from pageforge.report.panels.strips import Strip, Strips

FED = "Every way is fed the tokens that DynamicCache's logits choose."


def figures(results: Sequence[Record]) -> Iterator[Figure]:
    """The largest difference; how often the best token is the same."""
    for field, value, title, measured in (
        (
            "max_difference",
            Axis("largest difference of a logit", log=True),
            "How far the logits part",
            "The largest difference from DynamicCache's logits at any step.",
        ),
        (
            "same_argmax",
            Axis("share of steps with the same best token"),
            "How often the best token is the same",
            "Rows and steps in which the best token is DynamicCache's.",
        ),
    ):
        records = ran(results, "parity", field)
        yield Figure(
            field.replace("_", "-"),
            title,
            f"{measured} {FED} {same(records, 'rows', 'prompt', 'steps')}",
            "Text: a token that is drawn instead of the best one.",
            [
                Strips(dtype, value, _strips(group, field))
                for dtype, group in grouped(records, "dtype").items()
            ],
            failures(results, "parity", "model", "way", "dtype"),
        )


def _strips(records: Sequence[Record], field: str) -> list[Strip]:
    """A strip a model."""
    return [
        Strip(model, {record["way"]: record[field] for record in group})
        for model, group in grouped(records, "model").items()
    ]
