"""Linear layers with their adapters as one operator: values and gradients."""

import torch

from stretto.models.adapted_linear import adapted_linear


def test_adapted_linear_passes_gradcheck():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [draw(5, 6), draw(4, 6), draw(3, 6)]

    def work(x, first_down, second_down, first_up, second_up):
        downs, ups = [first_down, second_down], [first_up, second_up]
        cast = [up.detach() for up in ups]
        return adapted_linear(x, weights, downs, ups, torch.cat(downs).detach(), cast, [0, 2], 0.7)[0]

    inputs = [draw(7, 6), draw(2, 6), draw(2, 6), draw(5, 2), draw(3, 2)]
    expected = torch.cat([inputs[0] @ weight.t() for weight in weights], dim=1)
    expected[:, :5] += 0.7 * inputs[0] @ inputs[1].t() @ inputs[3].t()
    expected[:, 9:] += 0.7 * inputs[0] @ inputs[2].t() @ inputs[4].t()
    assert torch.allclose(work(*inputs), expected, atol=1e-12)
    assert torch.autograd.gradcheck(work, [each.requires_grad_() for each in inputs])
