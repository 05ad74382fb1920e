"""Lines that Python's JSON reader takes and this one rejects, with cause and field."""

STRICT = {
    "NaN": ('{"messages": [], "weight": NaN}', "not_finite", "weight"),
    "Infinity": ('{"messages": [], "weight": {"a": [-Infinity]}}', "not_finite", "weight.a[0]"),
    "beyond floats": ('{"messages": [], "weight": 1e999}', "not_finite", "weight"),
    "the same key twice": ('{"messages": [{"role": "user", "role": "assistant"}]}', "duplicate_key", "messages[0]"),
    "the same column twice": ('{"messages": [], "messages": []}', "duplicate_key", "row"),
    "5,000 digits": ('{"messages": [], "n": ' + "9" * 5000 + "}", "huge_number", "n"),
    "half a surrogate pair": (r'{"messages": [{"role": "user", "content": "a\ud800b"}]}', "bad_unicode", "messages[0].content"),
    "invalid UTF-8": (b'{"messages": [{"role": "user", "content": "a\xff"}]}', "bad_unicode", "messages[0].content"),
}
