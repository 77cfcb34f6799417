"""Language model of lm-evaluation-harness (``lm_eval``) over the model in training.

Tokens, truncation and stop sequences are those of ``HFLM``, by which lm_eval evaluates a Hugging
Face model, so that an exported model has the same results. Only this module and :mod:`.tasks`
import lm_eval, on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.evaluation.generation_options import (
    GenerationOptions,
    parse_generation_options,
)
from flagscale.train.evaluation.scoring import Score, ScoredSequence
from flagscale.train.generation import generate_greedily


class Scorer(Protocol):
    """Scoring of sequences, as :mod:`flagscale.train.evaluation.scoring` does it."""

    @property
    def max_length(self) -> int: ...

    def score(self, sequences: Sequence[ScoredSequence]) -> Sequence[Score]: ...

    def predict_next(self, sequences: Sequence[Sequence[int]]) -> Sequence[int]: ...


class HarnessModel(TemplateLM):  # type: ignore[misc] # lm_eval is optional and has no types here
    """Answers the requests of lm_eval's tasks."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._scorer, self._tokens = scorer, tokenizer
        self._special_ids = tokenizer.special_ids
        self._prefix_text = tokenizer.detokenize([self.prefix_token_id])

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        return self._tokens.eod if self._tokens.bos is None else self._tokens.bos

    @property
    def max_length(self) -> int:
        return self._scorer.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_options: Any
    ) -> list[int]:
        """Return the token ids of a text.

        By default the tokenizer's own special tokens are added, as transformers does, unless the
        text begins with the first one.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        if add_special_tokens:
            return self._tokens.tokenize_with_special_tokens(string)
        return self._tokens.tokenize(string)

    def tok_decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self._tokens.detokenize([t for t in tokens if t not in self._special_ids])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each continuation (last item of a request), given
        its context. A context that is too long loses its beginning.
        """
        sequences = [
            ScoredSequence((context + answer)[-(self.max_length + 1) :], len(answer))
            for _, context, answer in requests
        ]
        return [(score.log_likelihood, score.is_greedy) for score in self._scorer.score(sequences)]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each request's continuation."""
        del disable_tqdm
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text; long ones in windows of ``max_length`` tokens."""
        del disable_tqdm
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[index] += value
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context up to a stop sequence."""
        del disable_tqdm
        texts: list[str] = [""] * len(requests)
        groups: dict[GenerationOptions, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(parse_generation_options(request.args[1]), []).append(index)
        for options, members in groups.items():
            contexts = [requests[index].args[0] for index in members]
            for index, text in zip(members, self._generate(contexts, options), strict=True):
                texts[index] = text
        return texts

    def _generate(self, contexts: Sequence[str], options: GenerationOptions) -> list[str]:
        max_context = self.max_length - options.max_tokens
        prompts = [self.tok_encode(context)[-max_context:] for context in contexts]
        stops = (*options.stops, self._tokens.detokenize([self.eot_token_id]))

        def is_finished(answer: Sequence[int]) -> bool:
            if answer[-1] == self.eot_token_id:
                return True
            text = self.tok_decode(answer)
            return any(stop in text for stop in stops)

        answers = generate_greedily(
            self._scorer.predict_next, prompts, options.max_tokens, is_finished
        )
        return [_cut_at_stops(self.tok_decode(answer), stops) for answer in answers]


def _cut_at_stops(text: str, stops: Iterable[str]) -> str:
    for stop in stops:
        text = text.split(stop, maxsplit=1)[0]
    return text
