"""`fedcgd explain`: the same steps as the library, as text, as JSON, and the trade-off curve."""

import json
from pathlib import Path

from command_line import run

from fedcgd import LambdaCGD, Participation
from fedcgd.accounting.explain import explain

RUN = ["--mechanism", "lambda-cgd:0.8", "--rounds", "12", "--separation", "4", "--delta", "1e-5"]


def invoke(*words: str):
    return run("explain", *RUN, *words)


def test_json_is_the_library_s_answer() -> None:
    result = invoke("--epsilon", "2", "--clip-norm", "0.5", "--json")
    assert result.exit_code == 0
    expected = explain(LambdaCGD(0.8), Participation(rounds=12, min_separation=4), clip_norm=0.5, delta=1e-5, epsilon=2)
    assert [(x["title"], x["statement"], x["value"]) for x in json.loads(result.stdout)] == [
        (step.title, step.statement, step.value) for step in expected
    ]


def test_text_has_each_step_in_order() -> None:
    result = invoke("--noise-multiplier", "3")
    assert result.exit_code == 0
    steps = explain(
        LambdaCGD(0.8), Participation(rounds=12, min_separation=4), clip_norm=1.0, delta=1e-5, noise_multiplier=3
    )
    text = " ".join(result.stdout.split())
    at = [text.index(f"{count}. {step.title} {step.statement}") for count, step in enumerate(steps, start=1)]
    assert at == sorted(at)


def test_plot_draws_the_trade_off(tmp_path: Path) -> None:
    assert invoke("--epsilon", "2", "--plot", str(tmp_path / "f.png")).exit_code == 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "give --epsilon or --noise-multiplier: one of the two" in result.stderr
