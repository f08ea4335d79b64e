"""A registered model as MLflow's own tools load it: this file as code, the checkpoint and the profile as data.

MLflow keeps a copy of this file in the model's folder and runs it where the model is loaded, so it needs the package loopcore
there and nothing else of this repository. Nothing is unpickled: the weights are safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from loopcore.batching import LoopBatchEngine, ModelStepper, Request
from loopcore.checkpoint import checkpoints, load_model
from loopcore.errors import InputError, LoopcoreError
from loopcore.halting import HaltingProfile, default_max_loops
from loopcore.specs import HaltingSpec, parse_halting
from loopcore.tasks import load_task

__all__ = ["LoopedModel"]

LOOPS_FACTOR = 4  # most loops that may be asked for, as a multiple of the trained budget


class LoopedModel(PythonModel):
    """Answers words, each after as many loops as its halting rule says."""

    def load_context(self, context: PythonModelContext) -> None:
        """Reads the artifacts `checkpoint` and, where the run was probed, `profile`. Raises CheckpointCorrupt."""
        place = Path(context.artifacts["checkpoint"])
        newest = checkpoints(place)
        self.model, self.spec = load_model(newest[0] if newest else place)
        self.task = load_task(self.spec.task)
        profile = context.artifacts.get("profile")
        content = json.loads(Path(profile).read_text()) if profile else {}
        self.profile = HaltingProfile.from_json(content["halting"]) if content.get("halting") else None

    # The input bears no annotation: MLflow would make a signature of it, and complains of one that does not suit it.
    def predict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, context: PythonModelContext | None, model_input, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """One row a word: `answer` (text for text, ids for ids), `loops`, `loops_planned`, `exit_reason`.

        Words are text or lists of token ids: a list of them, a column of a DataFrame, or ids as an array [B, N]. `params` may
        have `halt`, a rule in its short form (`rule`, `fixed:12`, `calibrated:0.01`, `converged`); by default `rule`, or the
        loops of the training contract where no speed was measured. Raises InputError for a word or a rule that the model
        cannot take.
        """
        words = list(_words(model_input))
        rule = (params or {}).get("halt")
        try:
            asked = parse_halting(str(rule)) if rule else None
        except ValueError as error:
            raise InputError(f"halt is {rule!r}; expected rule, fixed:T, converged or another halting rule") from error
        requests = [self._request(word, asked) for word in words]
        found = self._engine().run(requests)
        failed = next((one for one in found if one.outputs is None), None)
        if failed is not None:
            raise LoopcoreError(f"a word could not be computed: {failed.error or failed.exit_reason}")
        answers = [
            self.task.decode(one.outputs or ()) if isinstance(word, str) else list(one.outputs or ())
            for word, one in zip(words, found, strict=True)
        ]
        return pd.DataFrame(
            {
                "answer": pd.Series(answers, dtype=object),
                "loops": pd.Series([one.loops_used for one in found], dtype="int64"),
                "loops_planned": pd.Series([one.loops_planned for one in found], dtype=object),
                "exit_reason": pd.Series([str(one.exit_reason) for one in found], dtype=object),
            }
        )

    def _request(self, word: str | list[int], asked: HaltingSpec | None) -> Request:
        tokens = tuple(self.task.encode(word) if isinstance(word, str) else word)
        if asked is None:
            asked = HaltingSpec() if self.profile else HaltingSpec(kind="fixed", loops=self._budget(len(tokens)))
        if asked.watches:
            asked = asked.model_copy(update={"max_loops": default_max_loops(self.profile)(len(tokens))})
        return Request(tokens, asked)

    def _budget(self, length: int) -> int:
        contract = self.spec.contract
        return max(contract.most_loops, contract.loops.loops(max(length, 1)))

    def _engine(self) -> LoopBatchEngine:
        planned = default_max_loops(self.profile)
        return LoopBatchEngine(
            ModelStepper(self.model),
            profile=self.profile,
            max_loops=lambda length: max(planned(length), LOOPS_FACTOR * self._budget(length)),
        )


def _words(given: Any) -> Iterable[str | list[int]]:
    """Text or token ids of each word. Raises InputError for what is neither."""
    if isinstance(given, pd.DataFrame):
        numbers = all(pd.api.types.is_integer_dtype(kind) for kind in given.dtypes)
        given = given.to_numpy() if numbers and len(given.columns) != 1 else given.iloc[:, 0]
    for number, word in enumerate([given] if isinstance(given, str) else given):
        plain: Any = word if isinstance(word, str) or not hasattr(word, "tolist") else word.tolist()
        if isinstance(plain, str):
            yield plain
        elif isinstance(plain, list | tuple) and all(isinstance(token, int) and not isinstance(token, bool) for token in plain):
            yield list(plain)
        else:
            raise InputError(f"word {number} is {str(word)[:60]!r}; expected text such as '3 1 4', or a list of token ids")


set_model(LoopedModel())
