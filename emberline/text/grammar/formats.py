"""String formats as patterns of well-formed texts. Where a format allows odd corners, they are left out."""

_HOUR = r"(?:[01][0-9]|2[0-3])"
_SECONDS = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9]"
_LEAP = r"(?:1[0-9]|2[0-9])(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = rf"{_SECONDS}(?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9]){0,20}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"{_H16}(?::{_H16}){{7}}",
        *(rf"{_H16}(?::{_H16}){{{n - 1}}}::(?:{_H16}(?::{_H16}){{0,{6 - n}}})?" for n in range(1, 6)),
        rf"::(?:{_H16}(?::{_H16}){{0,6}})?",
        rf"{_H16}(?::{_H16}){{5}}::{_H16}",
        rf"{_H16}(?::{_H16}){{6}}::",
        rf"::(?:ffff:)?{_IPV4}",
    ]
)
_PATH_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
_TAIL = rf"(?:/{_PATH_CHAR}*)*{_QUERY}"
_PORT = r"(?::[1-9][0-9]{0,3})?"
_URI = rf"(?:[a-z][a-z0-9+]{{1,11}}://{_HOST}{_PORT}{_TAIL}|(?:mailto|urn|tel|data):[A-Za-z0-9._~:@/,;=+-]+)"
_RELATIVE = rf"(?:/|\./|\.\./)?(?:[A-Za-z0-9._~-]+(?:/[A-Za-z0-9._~-]*)*)?{_QUERY}"
_POINTER = r"(?:/(?:[A-Za-z0-9 _.!$%&\'()*+,;=:@?#<>|{}^-]|~[01])*)*"
_LOCAL = r"[A-Za-z0-9_](?:[A-Za-z0-9_]|[.+-][A-Za-z0-9_]){0,31}"  # at most 64 characters, by the standard
_EMAIL = rf"{_LOCAL}@{_LABEL}(?:\.{_LABEL}){{0,3}}\.[A-Za-z]{{2,10}}"
_CLOCK_PART = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)".replace("[0-9]+", "[0-9]{1,9}")
_DURATION = (
    rf"P(?:{_CLOCK_PART}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK_PART})?|[0-9]+W)"
).replace("[0-9]+", "[0-9]{1,9}")
_REGEX = r"\^?(?:(?:[A-Za-z0-9 _/@:,-]|\\[dws.]|\[[a-z0-9]+\]|\.)[*+?]?)*\$?"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "url": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "iri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "uri-template": rf"(?:https?://{_HOST})?(?:/(?:[A-Za-z0-9._~-]+|\{{[a-z][a-z0-9_]*\}}))*",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
    "regex": _REGEX,
}
