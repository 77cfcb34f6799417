"""CRC-32 by the fastest implementation that is installed."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32  # takes a third of the time
except ImportError:  # there is no wheel for this machine
    from zlib import crc32

__all__ = ["crc32"]
