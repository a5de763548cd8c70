"""Results of assertions as JUnit XML, which every CI reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

from .asserts import Result

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Iterable[Result], suite: str, seconds: float = 0.0) -> str:
    """One test case a result. What XML cannot hold becomes '?'."""
    results = list(results)
    failed = sum(not r.ok for r in results)
    root = ElementTree.Element("testsuites", tests=str(len(results)), failures=str(failed))
    attributes = {"name": clean(suite), "tests": str(len(results)), "failures": str(failed), "errors": "0"}
    group = ElementTree.SubElement(root, "testsuite", attributes, time=f"{seconds:.3f}")
    for one in results:
        case = ElementTree.SubElement(group, "testcase", classname=clean(suite), name=clean(one.name))
        if not one.ok:
            first = one.message.splitlines()[0] if one.message else "failed"
            failure = ElementTree.SubElement(case, "failure", message=clean(first), type="k3.budget")
            failure.text = clean(one.message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def clean(text: str) -> str:
    return NO_XML.sub("?", text)
