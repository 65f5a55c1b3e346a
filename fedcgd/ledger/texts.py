"""What the ledger says to people, apart from what it does: each refusal, problem and note by the reason that stands for it."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from fedcgd.support.numbers import plural

NAMED = 5
"""Rounds or runs that a sentence names before it says that there are more."""


class Finding(str):
    """A sentence of `TEXTS`. `reason` is the row that it is from: programs ask for that, and people read the sentence."""

    reason: str


class LedgerError(ValueError):
    """What the ledger refuses, with the value and the remedy."""

    @property
    def reason(self) -> str:
        """The row of `TEXTS` that says why."""
        said: Finding = self.args[0]
        return said.reason


class _Words(Formatter):
    """`{rounds:round is|rounds are}` is "1 round is" or "2 rounds are"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        one, several, many = format_spec.partition("|")
        return plural(value, one, many) if several else str(super().format_field(value, format_spec))


def finding(reason: str, /, **facts: object) -> Finding:
    """The sentence for a reason, with these facts in it. Raises KeyError for a reason or fact that is missing."""
    said = Finding(_Words().vformat(TEXTS[reason], (), facts))
    said.reason = reason
    return said


def about(what: object, found: Finding) -> Finding:
    """The same finding, about one of several ledgers."""
    said = Finding(f"{what}: {found}")
    said.reason = found.reason
    return said


def refuse(reason: str, /, **facts: object) -> LedgerError:
    """The error that a function raises for a reason."""
    return LedgerError(finding(reason, **facts))


_OVER = "If it is lost, the run is over: what it released stays released. Begin another with a new key and ledger"
_ANOTHER = "Another path would be a second run, and everybody in both would pay for both (fedcgd ledger compose)"
_NOT_NAMED = "a key's register knows of {runs:run that is|runs that are} not named: {ledgers}"
_CANNOT = "{path} cannot be read as a ledger: {error}"

REFUSALS = {
    # Files that are no ledger, or not this run's
    "no-ledger": "there is no ledger at {path}",
    "another-version": "{path} holds no run, or one of another version of fedcgd (this one reads format {format})",
    "earlier-version": "{path} is of an earlier version of fedcgd, and {what}: this version cannot say that. Read it with the "
    "version that wrote it, and count all of its plan",
    "came-into-use": "{path} came into use while it was read; try again",
    "unreadable-while-in-use": f"{_CANNOT}; its run goes on or was killed: copy it and its -wal file to where you may write",
    "unreadable": f"{_CANNOT}; give the run's ledger, not a key or a model. If no whole copy is left, all of its plan counts",
    "in-another-process": "{path} is open in another process ({holder}), whose run is not touched. End that process first: then "
    "the run goes on from its last release, or can be sealed",
    "opened-again": "{path} was opened again since, and the run goes on there: nothing may be released here any more",
    "sealed": "{path} was sealed on {sealed}: its run is over; begin another one with a new ledger and key",
    "another-plan": f"{{path}} has another run: its plan is not the same (on record → here): {{differing}}. {_ANOTHER}",
    "another-configuration": "{path} has another run: its configuration is not the same (on record → here): {differing}. "
    f"{_ANOTHER}",
    "another-key": f"{{path}} has another run: its key's fingerprint is {{there}}, here it is {{here}}. {_OVER}. {_ANOTHER}",
    "key-lost": f"there is no key file {{file}}, and the run in {{path}} began with a key (fingerprint {{there}}): put it and its"
    f" register {{register}} back. {_OVER}. {_ANOTHER}",
    # The key's register
    "ledger-is-the-register": "{path} is where the key's runs are remembered; the ledger is a file of its own",
    "register-missing": "there is no register of a key's runs at {path}",
    "unreadable-register": "{path}, a register of a key's runs, cannot be used: {error}; name another with runs=",
    "register-lost": f"{{problem}}. Without it nobody can say whether another copy of a run went on: put it back. {_OVER}",
    "begun-before": "this key began the same run on {run.begun}, in the ledger {run.ledger}: {run.released:round is|rounds are} "
    f"released (sealed: {{sealed}}). {{ledger}} would start again from its first round: give that ledger. {_OVER}",
    "begun-again": "this key began the same run again on {run.begun}, in the ledger {run.ledger}: {path} is over",
    "unknown-to-the-register": "{path} has released {rounds:round|rounds}, and {register}, the register of its key's runs, does"
    f" not know of it: it is another register, or was made anew. Put the right one back. {_OVER}",
    "old-copy": "{path} has {rounds:released round|released rounds} on record, and this key has released {released} of this run:"
    f" it is an old copy, or its -wal file is missing. Give the latest ledger. {_OVER}",
    "copy-went-on": "another copy of {path} has released round {round}: go on with that one, and never with this",
    "interrupted": "round {round} is not released: the one before was interrupted, on the ledger and not yet in {register}. "
    "Open the ledger again, and the run goes on",
    "another-copy": "round {round} is not released: another copy of this run was begun again or has released "
    f"{{known:round|rounds}}. {_OVER}",
    # Steps of a run
    "out-of-turn": "round must be {expected}, the first that is not released, got {round}",
    "in-flight": "an attempt at round {round} is in flight; release it, or call skip, before another begins",
    "out-of-order": "attempt {attempt} at round {round} is not at this step: plan, sum and release it, in this order and once",
    "nonce-used": "round {round} has had noise of this nonce already; make another with NoiseKey.nonce_of",
    "not-opening": "no keepers were asked to open round {round}: it can be tried again, and is not consumed",
    "too-often": "{users:user|users} would take part more than {k} times, or less than {b} rounds apart, in round {round}; "
    "fedcgd.participation.cohorts.cohort never chooses them",
    "another-bin": "{users:user|users} would take part in round {round}, which is not of their bin (round modulo {b}); "
    "fedcgd.participation.cohorts.cohort never chooses them",
    # Its end
    "another-key-to-seal": "{path} is not the key of this run (fingerprint {fingerprint}); nothing is deleted",
    "no-key-to-seal": "there is no key file {path}: nothing is sealed, and nothing is deleted",
    "key-of-another-run": "{path} is also the key of the run in {run.ledger} ({run.released:round|rounds} released): nothing is "
    "sealed or deleted. Seal that run first; if its ledger is lost, seal this one without --key-file and delete the key yourself",
    # The last model
    "model-in-the-way": "{path} holds a model of another run, and this run would write over it: move it to where that run's "
    "ledger is now, or delete it",
    "model-missing": f"{{path}}, the last model of the run in {{ledger}}, is missing: put it back. {_OVER}",
    "model-changed": "{path} is not the model of release {release} of the run in {ledger}: damaged, or of another round or run. "
    f"Put the right file back. {_OVER}",
    "no-model": "{path} has released no model yet",
    "another-last-model": "{path} contradicts itself: its last model is number {number}, and {models:model is|models are} "
    "released; fedcgd ledger verify says what else",
    "model-without-layout": "{path} holds no model with the names and shapes of its arrays: central training keeps none in its "
    "ledger, so ask for the model",
    "another-suffix": "a model is written to a file .npz, got {name}",
    # Several runs
    "evaluations-alone": "{path} records the evaluations of a run whose own ledger is not named: name both",
    "evaluations-missing": "{path} is of a run that was evaluated on its users' data too, and {beside}, which says who was in "
    "that, is not there, or of another run: put it there",
    "evaluations-only": "{path} records the evaluations of a run only: a statement is made from the ledger of that run",
    "several-deltas": "the runs have different δ ({deltas}); give one delta for all",
    "unknown-user": "no run has a user {user!r}",
    "no-users": "no users are on record: nobody was asked in any of the runs",
    "own-ledger": "{path} is this run's own ledger; after names those of earlier runs",
    "simulation-before": "{path} is of a simulation, in which nothing was private. If no real person was in it, leave it out",
    "not-over": "{path} is of a run that may go on ({released} of {rounds} rounds are released) and ask more users: let it "
    "finish, or end it with fedcgd ledger seal {path}",
    "contradiction-before": "records contradict each other, and nobody can say what the runs cost: {problems}",
    "unnamed-before": "{path} came after {runs:run that is|runs that are} not named (streams {streams}); name all",
    "unregistered-before": f"{_NOT_NAMED}. Users in it pay for it too: give the ledger in after= as well, sealed or "
    "finished, or delete one that has released nothing. If one is lost that has, begin with other people and another key",
    "nobody-may-take-part": "nobody may take part: this plan and {runs:earlier run|earlier runs} with a secret sampling cost ε "
    "≤ {cost} at δ = {delta:g}, and the joint budget is {epsilon:g}; raise it, or plan a smaller ε",
}
"""Reason → what a `LedgerError` says, with the value, the limit and the remedy."""

PROBLEMS = {
    "another-hash": "the plan and the configuration are not those whose hash is on record",
    "too-many-rounds": "{released:round is|rounds are} released, and {planned} are accounted for",
    "two-sums": "{number:nonce is|nonces are} on record for two sums",
    "another-turn": "{number:attempt is|attempts are} at a round before which another one is not released",
    "attempts-missing": "attempts are missing, or numbered anew, at {number:place|places}",
    "another-state": "{number:attempt has|attempts have} a sum, a nonce or an end that does not belong to the state on record, "
    "or none where one does",
    "last-model": "the last model on record is {here}, and {models:model is|models are} released",
    "opened-and-undone": "keepers were asked to open {number:round|rounds} that count as neither released nor consumed",
    "spent-unasked": "{number:round is|rounds are} consumed that no keepers were asked to open",
    "made-up-stream": "the run is called private, and its stream is that of a simulation or made up ({run.stream_id!r})",
    "more-participations": "{number:user|users} took part more than {k} times",
    "too-close": "{number:time|times} a user took part less than {b} rounds after the last",
    "two-bins": "{number:time|times} a user took part in another than its bin (round modulo {b})",
    "other-counters": "{number:user has|users have} counters that differ from the cohorts on record",
    "users-unknown": "{number:user who was asked is|users who were asked are} not in the table of users",
    "other-keepers": "{rounds:round has|rounds have} other keepers than the run",
    "no-opening": "{rounds:round was|rounds were} released without the keepers' opening on record",
    "model-differs": "the model's file is not what was released last: it was changed, or is of another round or run",
    "register-does-not-know": "{register}, the register of its key's runs, does not know of this run",
    "register-has-other-settings": "plan, configuration or key are not those with which {register} knows the run",
    "register-has-more": "the key has released {there:round|rounds} of this run ({register}), and {here} are on record: it is "
    "an older copy, or releases were taken out",
    "register-has-less": "{here:round is|rounds are} on record, and {register} knows of {there}: it is an older copy",
    "register-has-another-nonce": "round {there} was released under another nonce than {register} knows: another copy of this "
    "ledger went on, or somebody changed it",
    "register-has-a-seal": "the run was sealed on {sealed} ({register}), and this ledger is not: it is an older copy",
    "ledgers-missing": "{path} counted {runs:earlier run whose ledger is|earlier runs whose ledgers are} not given (streams "
    "{streams}): what follows is without them",
    "beyond-the-budget": "{users:user is|users are} in {path}, begun with a joint budget of ε = {budget[epsilon]:g} at δ = "
    "{budget[delta]:g}, and in other runs ({runs}): together they cost up to ε = {cost}. Name every earlier ledger over these "
    "people in after=, and begin later runs with this budget and this ledger named",
}
"""Reason → what contradicts the rest of the records."""

NOTES = {
    "no-register": "compared with no register of the key's runs: an older copy of this ledger would look the same. The operator"
    " has it next to the key (noise.key.runs): --register FILE",
    "another-place": "on {at}, after {rounds:round|rounds}, the run went on with a ledger that had been copied, restored or "
    "moved to another disk: if it also went on where it was before, everybody pays for both (fedcgd ledger compose)",
    "kept-sums": "{sums:noised sum|noised sums} may have reached the inner strategy without being released (of round {rounds}):"
    " if what it saw there was kept, ε of the whole run is at most {kept} at δ = {delta} ({adjacency}; secret rounds count as "
    "known; exact Gaussian mechanism), and not {whole}",
    "central": "central training: what is protected is one example, named by its row number. ε does not cover a person with "
    "several rows as a whole, and runs compose row by row",
    "model-not-there": "the file of the last model is not next to the ledger, and was not compared",
    "seal-unknown": "the ledger says that the run was sealed on {sealed}, and {register} does not: the seal was written by "
    "hand, or its key was kept elsewhere; ask whether it is deleted",
    "unnamed-runs": f"{_NOT_NAMED}: users in it pay for it too; name all ledgers",
    "went-apart": "{path} is a copy that went its own way: each copy counts with all of its rounds",
    "older-copy": "{path} is the latest of several copies of one run, and counts for all of them: {copies}",
}
"""Reason → what contradicts nothing, and a reviewer has to know or ask about."""

TEXTS: Mapping[str, str] = {**REFUSALS, **PROBLEMS, **NOTES}
