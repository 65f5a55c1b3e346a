"""`fedcgd explain`: why ε holds, and what it demands."""

from dataclasses import asdict

from fedcgd.accounting.explain import explain as reasoning
from fedcgd.accounting.tradeoff import trade_off
from fedcgd.accounting.tradeoff_plot import plot_trade_off
from fedcgd.cli.commands import ExplainOptions
from fedcgd.cli.printing import check_plot, console, print_json


def explain(asked: ExplainOptions) -> None:
    """Print the chain of reasoning behind ε, in words and numbers, with what each assumption demands of a deployment."""
    check_plot(asked.plot)
    if (asked.epsilon is None) == (asked.noise_multiplier is None):
        raise ValueError("give --epsilon or --noise-multiplier: one of the two")
    participation = asked.run(asked.rounds)
    if asked.epsilon is None and asked.spelling().is_open:
        raise ValueError(
            f"--noise-multiplier belongs to one mechanism: write --mechanism {asked.spelling().row.spelling} with its number, "
            "or give --epsilon, for which the number is chosen"
        )
    chosen = asked.chosen(participation, epsilon=asked.epsilon, delta=asked.delta)
    steps = reasoning(
        chosen,
        participation,
        clip_norm=asked.clip_norm,
        delta=asked.delta,
        epsilon=asked.epsilon,
        noise_multiplier=asked.noise_multiplier,
        rho=asked.damping(participation, chosen),
    )
    if asked.plot is not None:
        sigma = next(step.value for step in steps if step.title == "noise")
        assert sigma is not None
        curve = trade_off(chosen, participation, noise_multiplier=sigma)
        plot_trade_off(asked.plot, {f"{chosen.name}, σ = {sigma:.4g}": curve})
    if asked.json:
        print_json([asdict(step) for step in steps])
        return
    for count, step in enumerate(steps, start=1):
        console.print(f"[bold]{count}. {step.title}[/bold]", highlight=False)
        console.print(f"{step.statement}\n", highlight=False, markup=False)
