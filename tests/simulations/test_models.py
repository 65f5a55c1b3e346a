"""Models: sizes, adapters, and weights from files."""

import pytest
import torch
from torch import Tensor, nn

from fedcgd.clipping.flat_models import layout
from fedcgd_simulations.models.bert import SHAPES as BERT_SHAPES
from fedcgd_simulations.models.bert import bert
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.lora import LoRALinear, add_lora
from fedcgd_simulations.models.lstm import WordLinear, lstm
from fedcgd_simulations.models.vit import SHAPES, Shape, VisionTransformer, vit
from fedcgd_simulations.models.weights import RandomWeightsWarning, weights_path
from fedcgd_simulations.models.wideresnet import wideresnet

SMALL_VIT = Shape(patch=8, layers=2, heads=2, hidden=16, mlp=32, image=32)
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 200, (4, 7), generator=torch.Generator().manual_seed(0))
TOKENS[0, 4:] = 0


def tiny_bert(monkeypatch, **options):
    monkeypatch.setitem(BERT_SHAPES, "bert-tiny", (2, 2, 16, 32))
    monkeypatch.setattr("fedcgd_simulations.models.bert.VOCABULARY", 200)
    return bert("bert-tiny", None, classes=3, **options)


def test_what_a_broken_backward_pass_leaves_in_the_lstm_is_forgotten():
    """It is of other examples, whose influence on the next step's rows no clipping would bound."""
    model = lstm(200, classes=3, embedding=8, hidden=8)
    for layer in model.lstm.modules():
        if isinstance(layer, WordLinear):
            layer.words = [(torch.ones(4, 8), torch.ones(4, 32))]
    model(TOKENS)
    assert [layer.words for layer in model.lstm.modules() if isinstance(layer, WordLinear)] == [[], []]


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (cnn, 0.288),
        (wideresnet, 8.94),
        (lambda: VisionTransformer(SHAPES["vit-b-16"], 10), 85.8),
        (lambda: VisionTransformer(SHAPES["vit-l-16"], 10), 303.3),
        (lambda: VisionTransformer(SHAPES["vit-h-14"], 10), 630.8),
        (lambda: lstm(8192), 0.937),
        (lambda: bert("bert-tiny", None), 4.39),
        (lambda: bert("bert-base", None), 109.5),
        (lambda: bert("bert-large", None), 335.1),
    ],
)
def test_sizes(make, millions):
    """Those of the paper's Table 1 and 2 to a few percent, where it gives them: 0.3, 9, 86, 307, 632, 1, –, 110, 340."""
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)


def torchvision_weights(
    layers: int, hidden: int, mlp: int, patch: int, patches: int, classes: int
) -> dict[str, Tensor]:
    """Random weights, under the names and in the shapes of torchvision's `VisionTransformer.state_dict()`."""
    sizes = {
        "class_token": (1, 1, hidden),
        "conv_proj.weight": (hidden, 3, patch, patch),
        "encoder.pos_embedding": (1, patches + 1, hidden),
        "encoder.ln.weight": (hidden,),
        "heads.head.weight": (classes, hidden),
    }
    for i in range(layers):
        layer = f"encoder.layers.encoder_layer_{i}"
        sizes |= {f"{layer}.{norm}.weight": (hidden,) for norm in ("ln_1", "ln_2")}
        sizes |= {f"{layer}.mlp.0.weight": (mlp, hidden), f"{layer}.mlp.3.weight": (hidden, mlp)}
        sizes |= {f"{layer}.self_attention.in_proj_weight": (3 * hidden, hidden)}
        sizes |= {f"{layer}.self_attention.out_proj.weight": (hidden, hidden)}
    for name in [name for name in sizes if name.endswith("weight")]:
        sizes[name.removesuffix("weight") + "bias"] = sizes[name][:1]  # one for each output
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(size, generator=generator) for name, size in sizes.items()}


def test_lora_starts_as_the_model_and_trains_little():
    model = VisionTransformer(SMALL_VIT, 3)
    nn.init.normal_(model.head.weight)
    before = model(IMAGES).detach()
    add_lora(model, rank=2, adapt=lambda name: name.endswith("query"), train=lambda name: name.startswith("head."))
    assert torch.allclose(model(IMAGES), before, atol=1e-6)
    # two layers of (16·2 + 2·16) and a head of 16·3 + 3
    assert layout(model).size == 2 * 64 + 51
    adapted = model.encoders[0].attention.query
    assert isinstance(adapted, LoRALinear)
    nn.init.ones_(adapted.up.weight)
    assert not torch.allclose(model(IMAGES), before, atol=1e-3)
    with pytest.raises(ValueError, match="linear layer"):
        add_lora(model, rank=2, adapt=lambda name: False, train=lambda name: False)
    with pytest.raises(ValueError, match="got 0"):
        add_lora(model, rank=0, adapt=lambda name: True, train=lambda name: False)


def test_random_weights_are_said_loudly_and_local_ones_used(tmp_path, monkeypatch):
    with pytest.warns(RandomWeightsWarning, match="bert-tiny.*RANDOM"):
        assert weights_path("bert-tiny") is None
    monkeypatch.setenv("FEDCGD_WEIGHTS", str(tmp_path))
    with pytest.warns(RandomWeightsWarning, match=str(tmp_path)):
        assert weights_path("bert-tiny") is None
    (tmp_path / "bert-tiny").mkdir()
    assert weights_path("bert-tiny") == tmp_path / "bert-tiny"


def test_a_local_vit_file_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "vit-b-16", SMALL_VIT)
    theirs = torchvision_weights(layers=2, hidden=16, mlp=32, patch=8, patches=16, classes=1000)
    torch.save(theirs, tmp_path / "vit_b_16.pth")
    monkeypatch.setenv("FEDCGD_WEIGHTS", str(tmp_path))
    ours = vit("vit-b-16")
    assert torch.equal(ours.patches.weight, theirs["conv_proj.weight"])
    assert ours.head.weight.shape == (10, 16)
    assert layout(vit("vit-b-16", lora_rank=4)).names[-1] == "head.bias"


def test_a_local_bert_folder_is_loaded(tmp_path, monkeypatch):
    model = tiny_bert(monkeypatch)
    model.bert.save_pretrained(tmp_path)
    again = bert("bert-tiny", tmp_path, classes=3)
    with torch.no_grad():
        assert torch.allclose(again.eval()(TOKENS), model.eval()(TOKENS), atol=1e-6)


def test_other_recurrent_layers_keep_opacus_own_gradients():
    from opacus import GradSampleModule
    from opacus.grad_sample import dp_rnn
    from opacus.layers.dp_rnn import RNNLinear

    assert GradSampleModule.GRAD_SAMPLERS[RNNLinear] is dp_rnn.compute_rnn_linear_grad_sample


def test_padding_does_not_matter_to_text_models(monkeypatch):
    for model in (lstm(200, classes=3, embedding=8, hidden=8), tiny_bert(monkeypatch)):
        with torch.no_grad():
            assert torch.allclose(model.eval()(TOKENS[:1, :4]), model(TOKENS[:1]), atol=1e-5)
