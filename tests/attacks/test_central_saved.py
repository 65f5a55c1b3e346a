"""Only the module of a private run is copied or pickled: two copies of anything else would release a round twice."""

import copy

import pytest
from central_runs import MODES, Run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["loader", "accountant", "engine", "optimizer"])
def test_only_the_module_of_a_run_is_copied(what, mode, monkeypatch):
    run = Run(monkeypatch, mode=mode)
    part = run.engine.accountant if what == "accountant" else getattr(run, what)
    with pytest.raises(TypeError, match="copied or"):
        copy.deepcopy(part)
    run.train()
    assert copy.deepcopy(run.module).state_dict().keys() == run.module.state_dict().keys()
