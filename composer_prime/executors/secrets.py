"""Values that must be seen by a job alone: they have no text form, and are cut out of what others print."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from composer_prime.redaction import Redactor, hidden_values


@dataclass(frozen=True, repr=False)
class Secrets:
    """Environment variables whose values are secret. Text forms and iteration give names only."""

    _values: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self._values))})"

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def reveal(self) -> dict[str, str]:
        """The values, to be handed to a platform's secret mechanism and to nothing else."""
        return dict(self._values)

    def also(self, values: Mapping[str, str]) -> "Secrets":
        """These, and `values`."""
        return Secrets({**self._values, **values})

    def redact(self, text: str) -> str:
        """`text` with every secret replaced, also where it stands as JSON or in a URL, or a long line of it alone."""
        return Redactor(hidden_values(self._values)).text(text)

    def redact_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """As `redact`, of lines as they come; a value that spans lines becomes one word, so lines may get fewer."""
        redactor, rest = Redactor(hidden_values(self._values)), b""
        for line in chain(lines, (None,)):
            shown = redactor.flush() if line is None else redactor.feed(f"{line}\n".encode("utf-8", "surrogateescape"))
            *whole, rest = (rest + shown).split(b"\n")
            yield from (each.decode("utf-8", "surrogateescape") for each in whole)
        if rest:
            yield rest.decode("utf-8", "surrogateescape")
