"""The durable record of one run: who took part in what, what noise was used, what was released. A SQLite file for each run.

The last released model and the inner strategy's state lie next to it: in `run.db-model-0` or `run.db-model-1`, by turns.
The server process may be killed at any instruction. Each step is durable before the next begins:

    with Ledger.open(path, plan=plan, configuration=settings, key=key) as ledger:
        stream = NoiseStream(key.noise_of(ledger.stream_id))
        noise = NoiseSource(plan.mechanism, plan.participation.rounds, GridNormals(stream, grid_of(plan, size)))
        while (run := ledger.resume()).round < plan.participation.rounds:
            history = ledger.history(available)
            users = cohort(…, run.round, available, history, key=key.choices_of(ledger.stream_id))
            attempt = ledger.plan_round(run.round, users)         # users are counted
            total = …                                             # train, sum
            nonce = key.nonce_of(ledger.stream_id, total, earlier=run.nonces, attempt=attempt)
            ledger.record_aggregated(run.round, attempt, nonce)   # the nonce's noise is this sum's, and no other's
            noise.add(total, [*run.nonces, nonce], plan.stddev)
            ledger.record_released(run.round, attempt, model, state)
            …                                                     # only now may the model leave the process

or `ledger.skip(round, reason)` instead of any of the three. What the process had begun and not released when it died is abandoned
when the ledger is opened again: the round is tried again, under a new attempt, and whatever its sum then is gets a nonce
and so a noise of its own. Opening is refused while another process has the file open (run.db-lock, next to it, says which).
`Ledger.open(":memory:", …)` keeps the same record without a file, for simulations.

`verify` re-derives ε from the records alone, `export` gives them as JSON-able values, `joint` says what several runs cost
together, `JointBudget` keeps each user within an ε for several runs, `released_model` gives the last model, `seal` ends a run
and deletes its key.
Nothing here holds the key, and anyone who reads it learns who took part when: it is for the server's operator only.
"""

from fedcgd.ledger.budget import Admission, JointBudget, JointRecord, UserGroup, joint
from fedcgd.ledger.model_file import released_model, save_model
from fedcgd.ledger.registry import seal
from fedcgd.ledger.run import Ledger, Run
from fedcgd.ledger.statement import export
from fedcgd.ledger.texts import Finding, LedgerError
from fedcgd.ledger.verification import Verification, verify

__all__ = [
    "Admission",
    "Finding",
    "JointBudget",
    "JointRecord",
    "Ledger",
    "LedgerError",
    "Run",
    "UserGroup",
    "Verification",
    "export",
    "joint",
    "released_model",
    "save_model",
    "seal",
    "verify",
]
