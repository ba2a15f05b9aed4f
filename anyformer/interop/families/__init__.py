"""Public model families, in the order of the search for an export.

albert      ALBERT: BERT with shared layers and factorised embeddings
bart        BART, mBART, Marian, Pegasus, M2M-100 and NLLB
bert        BERT, ELECTRA, and BigBird with full attention
block_fields  the fields of blocks that most families have
clip        CLIP: images and texts
cohere      Command R
decoder_frame  the ends of decoders around their blocks, the fields that most of them have, labels and spans
deberta     DeBERTa-v2 and v3: disentangled attention
deepseek    DeepSeek-V2 and V3: latent attention, shared experts
distilbert  DistilBERT
encoder_parts  names of layers and heads of the encoders
gemma       Gemma 1, 2 and 3
gpt2        GPT-2, GPT-Neo and GPT-J
gpt_oss     gpt-oss: sinks, clamped experts
llama       Llama, Mistral, Qwen2, Qwen3 and SmolLM3
llama_experts  Mixtral, Qwen2-MoE, Qwen3-MoE and Qwen3-Next
modernbert  ModernBERT
mpt         MPT: ALiBi, no biases
neox        GPT-NeoX and Pythia, BLOOM, Falcon
olmo        OLMo 2 and 3: norms after sublayers
opt         OPT and XGLM
phi         Phi-1 to Phi-4
roberta     RoBERTa, XLM-R, CamemBERT, MPNet and Longformer
stablelm    StableLM 3B and 2
starcoder2  StarCoder2
t5          T5, T5 1.1 and mT5
vit         ViT
whisper     Whisper: speech to text
"""

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean
from anyformer.interop.families.albert import ALBERT
from anyformer.interop.families.bart import BART, M2M100, MARIAN, MBART, PEGASUS
from anyformer.interop.families.bert import BERT, BIG_BIRD, ELECTRA
from anyformer.interop.families.clip import CLIP
from anyformer.interop.families.cohere import COHERE
from anyformer.interop.families.deberta import DEBERTA_V2
from anyformer.interop.families.decoder_frame import with_heads
from anyformer.interop.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from anyformer.interop.families.distilbert import DISTILBERT
from anyformer.interop.families.gemma import GEMMA, GEMMA2, GEMMA3
from anyformer.interop.families.gpt2 import GPT2, GPT_NEO, GPTJ
from anyformer.interop.families.gpt_oss import GPT_OSS
from anyformer.interop.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3
from anyformer.interop.families.llama_experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT
from anyformer.interop.families.modernbert import MODERNBERT
from anyformer.interop.families.mpt import MPT
from anyformer.interop.families.neox import BLOOM, FALCON, NEOX
from anyformer.interop.families.olmo import OLMO2, OLMO3
from anyformer.interop.families.opt import OPT, XGLM
from anyformer.interop.families.phi import PHI, PHI3
from anyformer.interop.families.roberta import CAMEMBERT, LONGFORMER, MPNET, ROBERTA, XLM_ROBERTA
from anyformer.interop.families.stablelm import STABLELM
from anyformer.interop.families.starcoder2 import STARCODER2
from anyformer.interop.families.t5 import MT5, T5
from anyformer.interop.families.vit import VIT
from anyformer.interop.families.whisper import WHISPER
from anyformer.interop.family import Family

_ALL: tuple[Family, ...] = (
    *(GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, NEOX, OPT, BLOOM),
    *(QWEN3_MOE, FALCON, PHI3, PHI, GPTJ, GPT_NEO, STARCODER2, SMOLLM3),
    *(OLMO2, OLMO3, STABLELM, COHERE, MPT, XGLM, QWEN2_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, QWEN3_NEXT),
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, MPNET, DISTILBERT, ELECTRA, ALBERT, MODERNBERT, DEBERTA_V2, BIG_BIRD),
    LONGFORMER,
    *(VIT, CLIP),
    *(T5, MT5, BART, MBART, MARIAN, PEGASUS, M2M100, WHISPER),
)
FAMILIES = {family.kind: with_heads(family) for family in _ALL}


def candidates(name: str | None) -> list[Family]:
    """Return the family of this name, or all of them; raise `ConfigError` for an unknown one."""
    if name is not None and name not in FAMILIES:
        raise ConfigError([Fault("family", f"= {name!r}: {did_you_mean(name, FAMILIES)}")])
    return [*FAMILIES.values()] if name is None else [FAMILIES[name]]
