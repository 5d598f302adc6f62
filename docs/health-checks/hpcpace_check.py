"""A ReFrame check: `hpcpace audit` on the nodes of a partition finds no failure.

    reframe -C SITE.py -c hpcpace_check.py -r -S num_tasks=4

It runs one task per node. A node that does not answer fails the check, too. Settings, by `-S NAME=VALUE`:
`num_tasks` (nodes; 0: all that are idle), `rules` (a list like N05,P01; by default all), `allows_warnings`, `program`.
"""

import json

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable


@rfm.simple_test
class HpcpaceAudit(rfm.RunOnlyRegressionTest):
    """The audit of all nodes together, so that those that differ from the others show."""

    descr = "hpcpace audit finds no failure"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    num_tasks = 1
    num_tasks_per_node = 1
    time_limit = "5m"
    tags = {"health", "maintenance"}

    program = variable(str, value="hpcpace")
    rules = variable(str, value="")
    allows_warnings = variable(bool, value=True)

    @run_before("run")
    def set_command(self) -> None:
        """Have the audit print one JSON object."""
        self.executable = self.program
        self.executable_opts = ["audit", "--json", *(["--rules", self.rules] if self.rules else [])]

    @sanity_function
    def has_no_failure(self) -> bool:
        """Fail with the findings, or with the nodes that did not answer."""
        with open(sn.evaluate(self.stdout), encoding="utf-8") as file:
            text = file.read()
        try:
            report = json.loads(text)
        except ValueError:
            return sn.assert_true(False, msg="the audit printed no JSON; see its standard error")
        severities = ("F",) if self.allows_warnings else ("F", "W")
        bad = [
            f"{found['severity']} {found['rule']} {found['place']} on {','.join(found['hosts'])}: {found['seen']}"
            for found in report["findings"]
            if found["severity"] in severities
        ]
        return sn.assert_eq(bad + report["missing"], [], msg="{0}")
