"""How far a public model is from itself here, for models of every shape: what the grid asserts and the table shows."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.generation.generate import generate
from anyformer.runs.run import Run
from tests.interop import (
    test_clip as clip,
    test_decoders as decoders,
    test_encoders as encoders,
    test_pairs as pairs,
    test_whisper as speech,
)
from tests.interop.public import PublicModel, Ragged, again, furthest, ragged, tensors

NEW = 8  # tokens that both write


class Measured(NamedTuple):
    """Largest differences over real tokens; greedy ids, where there are any; and the way back."""

    hidden: float
    output: float  # logits, or one vector per row
    greedy: bool | None
    back: bool  # the same bytes under the same names
    again: float  # the largest difference of what was written, in `transformers`; 0 but for other names of a function

    @property
    def furthest(self) -> float:
        return max(self.hidden, self.output)


@torch.no_grad()
def measure(public: PublicModel, folder: Path, *, writes: bool = True) -> Measured:
    """`writes`: greedy ids, too."""
    if public.config.model_type == "vit":
        return _images(public, folder)
    if public.config.model_type == "clip":
        return _images_and_texts(public, folder)
    theirs = public.saved(folder / "there")
    run = af.from_hf(folder / "there", device="cpu")
    match run.config.shape:
        case "decoder":
            return _decoder(run, theirs, folder, writes)
        case "encoder":
            return _encoder(run, theirs, folder)
        case "encoder-decoder" if public.config.model_type == "whisper":
            return _speech(run, theirs, folder)
        case "encoder-decoder":
            return _pair(run, theirs, folder, writes)


def _decoder(run: Run, theirs: hf.PreTrainedModel, folder: Path, writes: bool) -> Measured:
    hidden = output = 0.0
    for side in ("right", "left"):
        batch = ragged(44, 40, 17, side=side)
        found, mine = (
            run.model(batch.ids, segments=batch.segments),
            run.model.decode(batch.ids, segments=batch.segments),
        )
        expected = decoders.logits(theirs, batch)
        hidden = max(hidden, furthest(mine, _last(theirs, batch), batch.real))
        output = max(output, furthest(found, expected, batch.real))
    same = None
    if writes:
        start = ragged(24, 20, 7, side="left")
        said = generate(run.model, start.ids, segments=start.segments, max_new_tokens=NEW)[:, -NEW:]
        same = torch.equal(said, _greedy(theirs, start))
    exported, batch = _exported(run, theirs, folder, hf.AutoModelForCausalLM), ragged(44, 40, 17)
    far = furthest(decoders.logits(exported, batch), decoders.logits(theirs, batch), batch.real)
    return Measured(hidden, output, same, _kept(folder), far)


def _last(model: hf.PreTrainedModel, batch: Ragged) -> Tensor:
    """What the head reads, before any projection of its own."""
    head, seen = model.get_output_embeddings(), []
    narrow = getattr(model.base_model, "decoder", None)
    project = getattr(narrow, "project_out", None) or head
    hook = project.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    decoders.logits(model, batch)
    hook.remove()
    return seen[0]


def _greedy(model: hf.PreTrainedModel, batch: Ragged) -> Tensor:
    for _ in range(NEW):
        new = decoders.logits(model, batch)[:, -1:].argmax(-1)
        batch = Ragged(torch.cat((batch.ids, new), 1), torch.cat((batch.real, new >= 0), 1))
    return batch.ids[:, -NEW:]


def _encoder(run: Run, theirs: hf.PreTrainedModel, folder: Path) -> Measured:
    batch = ragged(44, 40, 17)
    types = batch.ids % theirs.config.type_vocab_size if theirs.config.model_type == "bert" else None
    more = {} if types is None else {"token_type_ids": types}
    hidden, expected = encoders.answers(theirs, batch, **more)
    found = run.model(batch.ids, segments=batch.segments, types=types)
    mine = run.model.encode(batch.ids, segments=batch.segments, types=types)
    real = batch.real if expected.dim() == 3 else torch.ones(len(batch.ids), dtype=torch.bool)
    auto = encoders.AUTO[next(end for end in encoders.AUTO if type(theirs).__name__.endswith(end))]
    exported = _exported(run, theirs, folder, auto)
    far = furthest(encoders.answers(exported, batch, **more)[1], expected, real)
    return Measured(furthest(mine, hidden, batch.real), furthest(found, expected, real), None, _kept(folder), far)


def _pair(run: Run, theirs: hf.PreTrainedModel, folder: Path, writes: bool) -> Measured:
    source, read = ragged(44, 40, 17), ragged(17, 44, 40, seed=1)
    found = run.model(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
    mine = run.model.encode(source.ids, segments=source.segments)
    hidden = theirs.get_encoder()(source.ids, attention_mask=source.mask).last_hidden_state
    expected, same = pairs.logits(theirs, source, read), None
    if writes:
        said = generate(run.model, source.ids, segments=source.segments, max_new_tokens=NEW)
        same = _same_up_to_pads(said, pairs.greedy(theirs, source), theirs)
    exported = _exported(run, theirs, folder, hf.AutoModelForSeq2SeqLM)
    far = furthest(pairs.logits(exported, source, read), expected, read.real)
    return Measured(furthest(mine, hidden, source.real), furthest(found, expected, read.real), same, _kept(folder), far)


def _same_up_to_pads(ours: Tensor, expected: Tensor, theirs: hf.PreTrainedModel) -> bool:
    """Compare ids; those of M2M-100 up to a <pad> that it wrote, which has no position there."""
    if theirs.config.model_type != "m2m_100":
        return torch.equal(ours, expected)
    before = (expected == theirs.config.pad_token_id).long().cumsum(1) == 0
    return torch.equal(ours[before], expected[before])


def _speech(run: Run, theirs: hf.PreTrainedModel, folder: Path) -> Measured:
    sounds, read = speech.frames(), torch.arange(5, 16)[None].expand(3, -1)
    real = torch.ones(3, dtype=torch.bool)
    expected = theirs(sounds.mT, decoder_input_ids=read).logits
    hidden = furthest(run.model.encode(sounds), theirs.get_encoder()(sounds.mT).last_hidden_state, real)
    same = torch.equal(generate(run.model, sounds, max_new_tokens=NEW), speech.greedy(theirs, sounds))
    exported = _exported(run, theirs, folder, hf.AutoModelForSpeechSeq2Seq)
    far = furthest(exported(sounds.mT, decoder_input_ids=read).logits, expected, real)
    return Measured(hidden, furthest(run.model(sounds, read), expected, real), same, _kept(folder), far)


def _images(public: PublicModel, folder: Path) -> Measured:
    theirs = public.built()
    theirs.save_pretrained(folder / "there")
    run = af.from_hf(folder / "there", device="cpu")
    size = (public.config.num_channels, public.config.image_size, public.config.image_size)
    images, real = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)), torch.ones(3, dtype=torch.bool)
    hidden, expected = encoders.vectors(theirs, images)
    labels = public.model is hf.ViTForImageClassification
    exported = _exported(run, theirs, folder, hf.AutoModelForImageClassification if labels else hf.AutoModel)
    far = furthest(encoders.vectors(exported, images)[1], expected, real)
    mine, found = run.model.encode(images), run.model(images)
    return Measured(furthest(mine, hidden, real), furthest(found, expected, real), None, _kept(folder), far)


def _images_and_texts(public: PublicModel, folder: Path) -> Measured:
    """Vectors of unit length in place of hidden states, and the logits of all pairs."""
    theirs = clip.there(public, folder / "there")
    run = af.from_hf(folder / "there", device="cpu")
    texts, images = clip.rows(run), clip.pixels(theirs)
    expected = theirs(texts.ids, images, attention_mask=texts.mask)
    vectors, logits = clip.answers(run, texts, images)
    hidden = float((vectors - torch.cat((expected.text_embeds, expected.image_embeds))).abs().max())
    exported = _exported(run, theirs, folder, hf.CLIPModel)
    exported.set_attn_implementation("eager")
    again = exported(texts.ids, images, attention_mask=texts.mask).logits_per_image
    far = float((again - expected.logits_per_image).abs().max())
    return Measured(hidden, float((logits - expected.logits_per_image).abs().max()), None, _kept(folder), far)


def _exported(run: Run, theirs: hf.PreTrainedModel, folder: Path, auto: Any) -> hf.PreTrainedModel:
    return again(run, folder / "back", auto, theirs.config.model_type)  # some are of several families


def _kept(folder: Path) -> bool:
    return tensors(folder / "back") == tensors(folder / "there")
