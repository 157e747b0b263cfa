"""A plugin for pytest: a failure is shown when it happens, and written down for ci/verdict.py."""

import pytest
from verdict import Failure, FailureLog


def pytest_configure(config):
    config.pluginmanager.register(AtOnce(config))


class AtOnce:
    """Shows a failure when it happens, and not again at the end."""

    def __init__(self, config):
        self.config = config
        self.log = FailureLog()

    @pytest.hookimpl(trylast=True)  # behind the letter that pytest writes
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.show(report, f"{report.when} of {report.nodeid}")
            alone = (f"{self.config.rootpath}/{report.nodeid}",)
            self.log.add(Failure(report.nodeid, alone, text_of(report)))

    def pytest_collectreport(self, report):
        if report.failed:
            self.show(report, f"collection of {report.nodeid}")

    def show(self, report, what):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_sep("_", what, red=True)
        for line in report.longreprtext.splitlines():
            terminal.write_line(line)
        for title, text in report.sections:
            terminal.write_sep("-", title)
            terminal.write_line(text)
        terminal.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self):
        self.config.option.tbstyle = "no"  # which leaves out the part at the end
        self.log.close()


def text_of(report):
    """Return what was captured before the assertion, for the end is what people read."""
    sections = (f"-- {title}\n{text.rstrip()}" for title, text in report.sections)
    return "\n".join([*sections, report.longreprtext])
