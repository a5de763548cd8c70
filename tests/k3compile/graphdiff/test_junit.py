"""JUnit XML that any reader takes, whatever stands in the messages."""

from xml.etree import ElementTree

from k3compile.graphdiff.asserts import Result
from k3compile.graphdiff.junit import junit


def test_failures_are_counted_and_texts_are_escaped():
    hostile = 'is 3 < 4 & "]]>" \x00\x1b[31m\ud800 é\nsecond line'
    root = ElementTree.fromstring(
        junit([Result("nodes <= 4", True, ""), Result("ops.a = 0", False, hostile)], 'b"<.toml', 1.5).encode()
    )
    suite = root.find("testsuite")
    assert (root.get("tests"), root.get("failures"), suite.get("time")) == ("2", "1", "1.500")
    assert suite.get("name") == 'b"<.toml'
    good, bad = suite.findall("testcase")
    assert good.find("failure") is None
    assert bad.get("name") == "ops.a = 0"
    assert bad.find("failure").text == 'is 3 < 4 & "]]>" ??[31m? é\nsecond line'
    assert bad.find("failure").get("message") == 'is 3 < 4 & "]]>" ??[31m? é'
