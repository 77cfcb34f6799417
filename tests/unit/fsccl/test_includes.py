"""Check that a source includes the standard headers of the names it uses.

A source must include them itself, or through a header of this project. Standard libraries differ in
which of their headers include which: a source with a missing include compiles with one of them, and
fails on a host with another.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from flagscale.comm.fsccl import build

SOURCES = Path(build.__file__).parent / "csrc"
HEADERS = {
    "algorithm": "all_of any_of copy count_if fill find find_if lower_bound max max_element min "
    "min_element none_of partial_sort reverse sort stable_sort upper_bound remove_if clamp unique",
    "array": "array",
    "atomic": "atomic atomic_thread_fence memory_order_acquire memory_order_relaxed",
    "bitset": "bitset",
    "chrono": "chrono",
    "cmath": "isnan isinf sqrt ldexp floor ceil round",
    "condition_variable": "condition_variable",
    "cstdint": "uintptr_t",
    "cstdio": "snprintf fprintf",
    "cstdlib": "getenv strtol strtoull abort",
    "cstring": "memcpy memset memcmp strerror strlen",
    "deque": "deque",
    "exception": "exception_ptr current_exception rethrow_exception make_exception_ptr",
    "functional": "function",
    "limits": "numeric_limits",
    "list": "list",
    "map": "map multimap",
    "memory": "unique_ptr shared_ptr weak_ptr make_unique make_shared enable_shared_from_this",
    "mutex": "mutex lock_guard unique_lock once_flag call_once recursive_mutex scoped_lock",
    "numeric": "accumulate iota gcd",
    "optional": "optional nullopt make_optional",
    "random": "mt19937 mt19937_64 random_device uniform_int_distribution",
    "set": "set multiset",
    "shared_mutex": "shared_mutex shared_lock",
    "sstream": "ostringstream istringstream stringstream",
    "stdexcept": "runtime_error invalid_argument logic_error out_of_range",
    "string": "string to_string stoi stoul stoull",
    "system_error": "system_error error_code generic_category system_category errc",
    "thread": "thread this_thread",
    "tuple": "tuple make_tuple tie",
    "type_traits": "is_same_v is_integral_v is_floating_point_v is_unsigned_v is_signed_v "
    "conditional_t enable_if_t decay_t is_trivially_copyable_v make_unsigned_t",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "move forward exchange swap pair make_pair",
    "variant": "variant holds_alternative get_if visit",
    "vector": "vector",
}
HEADER_OF = {name: header for header, names in HEADERS.items() for name in names.split()}
ALTERNATIVES = {
    "move": {"utility", "algorithm"},
    "pair": {"utility", "map", "unordered_map"},
    "make_pair": {"utility", "map", "unordered_map"},
}
"""Names that the standard specifies in other headers as well."""


@functools.cache
def included_headers(path: Path) -> frozenset[str]:
    """Return the standard headers that ``path`` includes, directly or through project headers."""
    headers: set[str] = set()
    for line in path.read_text().splitlines():
        if match := re.match(r"#include <([a-z_0-9]+)>", line):
            headers.add(match[1])
        elif match := re.match(r'#include "(.+)"', line):
            project_header = path.parent / match[1]
            if project_header.is_file():
                headers |= included_headers(project_header.resolve())
    return frozenset(headers)


def used_names(path: Path) -> set[str]:
    """Return the known names of namespace std in the code of ``path``."""
    code = re.sub(r"//[^\n]*|\"(\\.|[^\"\\])*\"", "", path.read_text())
    return set(re.findall(r"\bstd::(\w+)", code)) & HEADER_OF.keys()


@pytest.mark.parametrize(
    "path",
    sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu")),
    ids=lambda path: str(path.relative_to(SOURCES)),
)
def test_source_includes_what_it_uses(path: Path) -> None:
    missing = {
        f"{name}: <{HEADER_OF[name]}>"
        for name in used_names(path)
        if not ({HEADER_OF[name]} | ALTERNATIVES.get(name, set())) & included_headers(path)
    }
    assert not missing
