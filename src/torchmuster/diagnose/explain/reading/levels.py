"""How bad a logger says that a line is, and what it puts before a message beside the time."""

import re

INFO, WARNING, ERROR = "info", "warning", "error"
_WORDS = {
    INFO: "trace debug verbose dbug dbg info information informational notice success inf",
    WARNING: "warn warning wrn",
    ERROR: "err error critical crit fatal exception panic severe alert emerg emergency",
}
_LEVELS = {word: level for level, words in _WORDS.items() for word in words.split()}
_LEVELS |= {"i": INFO, "w": WARNING, "e": ERROR, "f": ERROR, "d": INFO, "v": INFO}
_UPPER = "|".join(
    sorted((word.upper() for word in _LEVELS if len(word) > 3), key=len, reverse=True)
)
_ANY = "|".join(sorted((word for word in _LEVELS if len(word) > 3), key=len, reverse=True))
_NAME = r"[\w.@/<>-]{1,80}+"
# A level stands first, behind one name, or in a mark of its own; in small letters only with such a mark.
_AT_THE_START = re.compile(
    rf"(?:[-|>] ?)?(?:(?:{_NAME}(?: - |: |\||:)|(?=[a-z]){_NAME} )?"
    rf"(?:(?P<upper>{_UPPER}|ERR)(?=[\s:|\]-]|$)|[\[(<](?P<marked>(?i:{_ANY}))(?:[|:][^\])>]{{1,80}})?\s*[\])>])"
    rf"|(?P<small>{_ANY})(?=: )|##\[(?P<hub>error|warning|debug)\]|::(?P<action>error|warning|notice)\b"
    rf"|\| ?(?P<loguru>{_UPPER}) *\|"
    rf"|\S+:\d+: \w*(?P<python>Warning): |kern *:(?P<kernel>\w+) *: )"
)
_LOGFMT = re.compile(r"\b(?:level|lvl)=\"?(?P<level>[a-zA-Z]+)")
# All that loggers put before a message: taken away where a part of a traceback follows, and only there.
_LOGGER = re.compile(
    rf"(?:[-|>] ?|##)?(?:{_NAME}(?: - |: |\|)|(?=[a-z]){_NAME} )?[\[(|]? ?(?:{_UPPER}|ERR|(?<=##\[)(?:error|warning|debug))(?:[|:][^\])>]{{1,80}}\])?\s*[\])|]?"
    rf"(?: ?(?:- |: ?|\| ?|>> |\[[^\]]{{1,80}}\]:? |{_NAME}:\d+(?: -|:|\]) |{_NAME}(?: - |:(?! \S)))|\d{{4}}-\d\d-\d\d[ T][\d:,.]+ )*"
    r" ?(?=Traceback \(most recent|  +\S|(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: |$))"
)
_PARTS = ("  ", "Traceback", "Error", "Exception", "Interrupt", "Exit")  # without them it can't fit


def level_of(text: str) -> str:
    """Return the level that a message without its time begins with; empty when it names none."""
    found = _AT_THE_START.match(text)
    if found is None and "l=" in text[:300]:
        found = _LOGFMT.search(text[:300])
    return level_named(found[found.lastgroup or 0]) if found is not None else ""


def level_named(word: str) -> str:
    """Return the level that a logger's word stands for; empty when it is none."""
    return _LEVELS.get(word.lower(), "")


def without_logger(text: str) -> str:
    """Return a line of a traceback as Python writes it, without what a logger has put before it."""
    if not any(part in text for part in _PARTS):
        return text
    found = _LOGGER.match(text)
    return text[found.end() :] if found is not None and found.end() else text
