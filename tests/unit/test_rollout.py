"""The rules of a site's roll-out: for which jobs they hold, and which of them are refused."""

from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.errors import ConfigError
from hpcpace.core.setting_values import JobFacts, Rule, place_of_job, read_rules

JOB = JobFacts(partition="gpu", user="ann", account="physics", nodes=frozenset(("n1", "n2")), job_id="7")
ON = {"trace": {"enabled": True}}


def rule(**conditions: object) -> Rule:
    (found,) = read_rules([{**conditions, **ON}], "site.toml")
    return found


@each_case(
    "conditions",
    [
        {},
        {"partitions": ["cpu", "gpu"]},
        {"partitions": "gpu"},
        {"nodes": "n[1-4]"},
        {"nodes": ["n1", "n[2-3],m7"]},
        {"users": ["ann"], "accounts": ["physics"], "partitions": ["gpu"], "nodes": "n[1-2]"},
        {"share": 1},
        {"share": place_of_job("7") + 1e-9},
    ],
)
def test_holds_for_a_job_that_meets_all_its_conditions(conditions):
    assert rule(**conditions).objection(JOB) == ""


@each_case(
    ("conditions", "objection"),
    [
        ({"partitions": ["cpu"]}, "the partition is 'gpu'"),
        ({"users": ["bob"]}, "the user is 'ann'"),
        ({"users": ["ann"], "accounts": ["chemistry"]}, "the account is 'physics'"),
        ({"nodes": "n1"}, "the job also has n2"),
        ({"nodes": "n[3-4]"}, "the job also has n[1-2]"),
        ({"share": place_of_job("7")}, f"the place of job 7 among all jobs is {place_of_job('7'):.4f}"),
    ],
)
def test_says_why_it_does_not_hold(conditions, objection):
    assert rule(**conditions).objection(JOB) == objection


@each_case(
    ("conditions", "objection"),
    [
        ({"partitions": ["gpu"]}, "the partition is unknown"),
        ({"nodes": "n1"}, "the nodes are unknown"),
        ({"share": 0.9}, "the job has no id"),
    ],
)
def test_does_not_hold_where_a_fact_is_unknown(conditions, objection):
    assert rule(**conditions).objection(JobFacts()) == objection


def test_a_share_of_jobs_is_that_share_and_a_larger_one_contains_it():
    small, large = rule(share=0.1), rule(share=0.3)
    jobs = [JobFacts(job_id=str(number)) for number in range(20_000)]
    in_small = {job.job_id for job in jobs if not small.objection(job)}
    in_large = {job.job_id for job in jobs if not large.objection(job)}
    assert in_small < in_large
    assert len(in_small) == pytest.approx(2000, abs=150) and len(in_large) == pytest.approx(6000, abs=250)


def test_the_place_of_a_job_is_the_same_on_every_machine():
    assert f"{place_of_job('123456'):.6f}" == "0.184861"


def test_facts_come_from_slurms_environment():
    environ = {
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_USER": "ann",
        "SLURM_JOB_ACCOUNT": "physics",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "SLURMD_NODENAME": "n2",
        "SLURM_RESTART_COUNT": "2",
    }
    assert JobFacts.of(environ) == JOB


def test_all_components_of_a_heterogeneous_job_count():
    environ = {
        "SLURM_JOB_ID": "8",
        "SLURM_JOB_ID_HET_GROUP_0": "7",
        "SLURM_JOB_NODELIST": "n2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n2",
    }
    facts = JobFacts.of(environ)
    assert (facts.nodes, facts.job_id) == ({"n1", "n2"}, "7")


@each_case("environ", [{}, {"SLURM_JOB_NODELIST": "n[1-"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_outside_slurm_facts_are_unknown(environ):
    facts = JobFacts.of(environ)
    assert (facts.partition, facts.nodes, facts.job_id) == ("", frozenset(), "")


_SETTINGS = "settings are those of trace, clock, audit, pace, like trace.enabled"
_KEYS = "conditions are partitions, users, accounts, nodes, share, and " + _SETTINGS


@each_case(
    ("rules", "message"),
    [
        ({"trace": {}}, "site.toml: rollout must be a list of tables, each headed by [[rollout]]"),
        (["gpu"], "site.toml: rollout must be a list of tables, each headed by [[rollout]]"),
        ([{"partition": "gpu", **ON}], f"rule 1 of site.toml: unknown key 'partition': {_KEYS}"),
        ([{"train": {"steps": 3}}], f"rule 1 of site.toml: unknown key 'train': {_KEYS}"),
        ([{"users": ["ann"]}], "rule 1 of site.toml sets nothing: add a setting like trace.enabled = true"),
        ([{"trace": {}}], "rule 1 of site.toml sets nothing: add a setting like trace.enabled = true"),
        ([{"share": 0, **ON}], "rule 1 of site.toml: share is 0: expected a number above 0 and at most 1"),
        ([{"share": 10, **ON}], "rule 1 of site.toml: share is 10: expected a number above 0 and at most 1"),
        ([{"share": "10%", **ON}], "rule 1 of site.toml: share is '10%': expected a number above 0 and at most 1"),
        ([{"share": True, **ON}], "rule 1 of site.toml: share is True: expected a number above 0 and at most 1"),
        (
            [{"share": float("nan"), **ON}],
            "rule 1 of site.toml: share is nan: expected a number above 0 and at most 1",
        ),
        (
            [ON, {"users": [], **ON}],
            "rule 2 of site.toml: users is []: expected a list of names, with at least one",
        ),
        (
            [{"accounts": [7], **ON}],
            "rule 1 of site.toml: accounts is [7]: expected a list of names, with at least one",
        ),
        ([{"nodes": "n[1-", **ON}], "rule 1 of site.toml: nodes: 'n[1-' is no list of hosts like n[1-4]"),
        ([{"nodes": "n[4-1]", **ON}], "rule 1 of site.toml: nodes: 'n[4-1]' is no list of hosts like n[1-4]"),
        (
            [{"trace": {"enabled": "perhaps"}}],
            "rule 1 of site.toml: trace.enabled is 'perhaps': expected on or off",
        ),
    ],
)
def test_refuses_a_wrong_rule_and_names_it(rules, message):
    with pytest.raises(ConfigError) as caught:
        read_rules(rules, "site.toml")
    assert str(caught.value) == message


_OFF = {"trace": {"enabled": False}}


@each_case(
    ("earlier", "later"),
    [
        ({}, {}),
        ({"users": ["ann"]}, {"users": ["ann"]}),
        ({"users": ["ann"]}, {}),
        ({"users": ["ann"]}, {"users": ["ann", "bob"]}),
        ({"nodes": "n[1-2]", "share": 0.1}, {"nodes": "n[1-4]", "share": 0.5}),
    ],
)
def test_refuses_a_rule_that_a_later_one_always_takes_back(earlier, later):
    with pytest.raises(ConfigError) as caught:
        read_rules([{**earlier, **ON}, {**later, **_OFF}], "site.toml")
    assert str(caught.value) == (
        "rule 2 of site.toml holds whenever rule 1 does, and sets trace.enabled to False, not True: later rules "
        "win, so put general rules before special ones, or remove one of the two"
    )


@each_case(
    ("earlier", "later"),
    [
        ({}, {"users": ["ann"]}),
        ({"users": ["ann"]}, {"users": ["bob"]}),
        ({"users": ["ann"]}, {"accounts": ["physics"]}),
        ({"share": 0.5}, {"share": 0.1}),
    ],
)
def test_takes_an_exception_from_an_earlier_rule(earlier, later):
    assert len(read_rules([{**earlier, **ON}, {**later, **_OFF}], "site.toml")) == 2
