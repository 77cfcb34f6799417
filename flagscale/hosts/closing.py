"""What is closed when a ``with`` block is left, however it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """A context manager that is entered as itself and closed at the end."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held. May be called more than once."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
