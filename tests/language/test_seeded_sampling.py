import torch

from pipeline.language.sampling import SeededSampler


def draw(seeds: list[int], logits: torch.Tensor, **options: float) -> list[int]:
    """One token a row, each row from its own generator."""
    sampler = SeededSampler(seeds, **{"temperature": 1.0, "top_p": 1.0} | options)
    return sampler(torch.zeros(len(seeds), 1, dtype=torch.long), logits.expand(len(seeds), -1)).argmax(-1).tolist()


def test_frequencies_are_the_distribution_s() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.bincount(torch.tensor(draw(list(range(20_000)), probabilities.log())), minlength=4) / 20_000
    # Four standard deviations of a share of 0.5 among 20,000 draws are 0.014.
    assert torch.allclose(counts, probabilities, atol=0.0145)


def test_temperature_sharpens_and_top_p_cuts() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draw(list(range(2000)), logits, top_p=0.7)) == {0, 1}
    assert set(draw(list(range(2000)), logits, temperature=0.01)) == {0}


def test_a_row_draws_alike_in_any_company() -> None:
    logits = torch.zeros(1, 1000)
    together = draw([5, 6, 7], logits)
    assert [draw([seed], logits)[0] for seed in (5, 6, 7)] == together
