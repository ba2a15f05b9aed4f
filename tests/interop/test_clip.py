"""CLIP: vectors of images and texts, logits and settings equal to those of `transformers`, and the way back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from typer.testing import CliRunner

import anyformer as af
from anyformer import presets
from anyformer.attention.layout import Layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.cli.app import app
from anyformer.config import LM, ConfigError, FeatureSegment, Media, ModelConfig
from anyformer.interop import import_model
from anyformer.interop.hf_folder import to_hf
from anyformer.nn.inputs import Inputs
from anyformer.runs.run import Run
from tests.interop.public import BOS, PAD, TOLERANCE, VOCAB, PublicModel, Ragged, tensors, write_tokenizer
from tests.interop.test_pictures import SIDE, draw

EOS = 4  # with id 2, transformers pools at the largest id of a row
TEXTS = ["a cat", "b", "abc zebra and a ball"]
PROCESSOR = CLIPImageProcessorPil(size={"shortest_edge": 26}, crop_size={"height": SIDE, "width": SIDE})


def clip(text: dict[str, Any] | None = None, seen: dict[str, Any] | None = None, width: int = 20) -> PublicModel:
    """A text model of width 24 and an image model of width 36."""
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = hf.CLIPConfig(
        text_config={"vocab_size": VOCAB, "hidden_size": 24, "max_position_embeddings": 40, **layers, **ids}
        | (text or {}),
        vision_config={"hidden_size": 36, "image_size": SIDE, "patch_size": 4, **layers} | (seen or {}),
        projection_dim=width,
    )
    return PublicModel(hf.CLIPModel, config, ("<s>", "$A", "<mask>"))


MODELS = {
    "quick_gelu": clip(),
    "gelu": clip({"hidden_act": "gelu", "layer_norm_eps": 1e-3}, {"hidden_act": "gelu", "layer_norm_eps": 1e-4}),
    "equal widths": clip({"hidden_size": 32}, {"hidden_size": 32}, width=32),
}


def there(public: PublicModel, folder: Path) -> hf.CLIPModel:
    """A public folder: model, tokenizer and settings of pictures."""
    torch.manual_seed(0)  # the class token is drawn before `built` sets a seed
    model = public.built()
    model.logit_scale.data.fill_(3.1)
    model.save_pretrained(folder)
    write_tokenizer(folder, *public.frame)
    PROCESSOR.save_pretrained(folder)
    return model


def rows(run: Run) -> Ragged:
    """Texts of unequal length, padded on the right."""
    ids = [[BOS, *run.tokenizer.encode(text), EOS] for text in TEXTS]
    longest = max(map(len, ids))
    real = torch.tensor([[i < len(row) for i in range(longest)] for row in ids])
    return Ragged(torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in ids]), real)


def pixels(model: hf.CLIPModel) -> Tensor:
    channels = model.config.vision_config.num_channels
    return torch.randn(4, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def answers(run: Run, texts: Ragged, images: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of length 1 of texts and images, which are one batch, and the scores of images and texts."""
    n, t = len(images), texts.ids.shape[1]
    ids = torch.cat((texts.ids, torch.zeros(n, t, dtype=torch.long)))
    segments = torch.cat((texts.segments, torch.tensor([[0] + [-1] * (t - 1)] * n)))
    at = torch.full_like(ids, -1)
    at[len(texts.ids) :, 0] = torch.arange(n)
    given = Inputs(ids, Layout.right_padded(segments), media=MediaBatch(images=images, image_at=at))
    vectors = run.model(given)
    said, seen = vectors[: len(texts.ids)], vectors[len(texts.ids) :]
    return torch.nn.functional.normalize(vectors, dim=-1), seen @ said.T


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_vectors_and_logits(name: str, tmp_path: Path) -> None:
    theirs = there(MODELS[name], tmp_path / "there")
    run = import_model(tmp_path / "there", tmp_path / "run")
    texts, images = rows(run), pixels(theirs)
    expected = theirs(texts.ids, images, attention_mask=texts.mask)
    for one in (run, af.load(tmp_path / "run")):
        vectors, logits = answers(one, texts, images)
        assert float((vectors - torch.cat((expected.text_embeds, expected.image_embeds))).abs().max()) <= TOLERANCE
        assert float((logits - expected.logits_per_image).abs().max()) <= 2 * TOLERANCE
    assert to_hf(run, tmp_path / "back") == "clip"
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    again = hf.CLIPModel.from_pretrained(tmp_path / "back", attn_implementation="eager")
    found = again(texts.ids, images, attention_mask=texts.mask)
    assert torch.equal(found.logits_per_image, expected.logits_per_image)


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("clip")
    there(MODELS["quick_gelu"], folder / "there")
    return import_model(folder / "there", folder / "run")


@torch.no_grad()
def test_labels_of_pictures(run: Run, tmp_path: Path) -> None:
    """The label of a picture is the text whose logit is the largest there, with their tokenizer and processor."""
    theirs = hf.CLIPModel.from_pretrained(run.folder.parent / "there", attn_implementation="eager")
    tokens = hf.PreTrainedTokenizerFast.from_pretrained(run.folder.parent / "there")
    files = [tmp_path / f"{i}.png" for i in range(8)]
    seen = PROCESSOR([draw(path, seed=i) for i, path in enumerate(files)], return_tensors="pt")["pixel_values"]
    given = tokens(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    logits = theirs(**given, pixel_values=seen).logits_per_image
    expected = [TEXTS[i] for i in logits.argmax(-1).tolist()]
    assert len(set(expected)) > 1
    names = [str(path) for path in files]
    assert run.predict(names, labels=TEXTS) == expected
    assert af.load(run.folder).predict([f"<image:{names[0]}>", names[1], " "], labels=TEXTS) == [*expected[:2], ""]
    options = [part for text in TEXTS for part in ("--label", text)]
    said = CliRunner().invoke(app, ["predict", str(run.folder), names[2], *options])
    assert said.stdout.splitlines() == expected[2:3]


def test_a_text_is_an_image_or_has_none(run: Run, tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="reads a text or one image, not both in one"):
        run.predict([f"<image:{tmp_path / 'a.png'}> a cat"])
    with pytest.raises(ConfigError, match="labels = \\[' '\\]: must be texts"):
        run.predict(["a cat"], labels=[" "])


def test_a_folder_without_settings_is_read_as_clip(run: Run, tmp_path: Path) -> None:
    (run.folder.parent / "there").rename(tmp_path / "there")
    (tmp_path / "there" / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match="pictures are read with the settings of CLIP"):
        found = import_model(tmp_path / "there", tmp_path / "run")
    assert found.spec.pictures.mean == run.spec.pictures.mean
    assert found.spec.pictures.resize.length == SIDE


def test_pooling_elsewhere_is_refused(run: Run, tmp_path: Path) -> None:
    """With eos_token_id = 2, `transformers` pools at the largest id."""
    config = run.config.model_copy(update={"special": run.config.special.model_copy(update={"eos": 2})})
    run.model.config, before = config, run.model.config
    try:
        with pytest.raises(ConfigError, match=r"special\.eos = 2: transformers would not pool at the last token"):
            to_hf(run, tmp_path / "back")
    finally:
        run.model.config = before


def test_what_a_tower_needs() -> None:
    with pytest.raises(ConfigError, match="image_tower: needs the head 'embedder', not 'lm'"):
        presets.clip(head=LM())
    small = presets.clip(depth=1, width=16, heads=2, vocab=50, image_depth=1, image_width=16, image_heads=2)
    with pytest.raises(ConfigError, match=r"image_tower\.source.image_height = 100: must be a multiple of patch = 32"):
        presets.clip(image=100)
    tokens = small.target.model_copy(update={"media": Media(features=FeatureSegment(size=2))})
    with pytest.raises(ConfigError, match="image_tower: is for models of one stack that reads tokens, without `media`"):
        ModelConfig.model_validate(small.model_copy(update={"target": tokens}).model_dump())


@torch.no_grad()
def test_only_a_whole_call_reads_images(tmp_path: Path) -> None:
    theirs = there(MODELS["gelu"], tmp_path / "there")
    model, ids = import_model(tmp_path / "there", tmp_path / "run").model, torch.zeros(4, 3, dtype=torch.long)
    media = MediaBatch(images=pixels(theirs), image_at=torch.full_like(ids, -1))
    read = model.decode if model.encoder is None else model.encode
    with pytest.raises(ValueError, match="leave `media` out"):
        read(ids, media=media)
