"""The public families, in the order in which one is looked for that has a model.

albert      ALBERT (Lan et al
bart        BART (Lewis et al
bert        BERT (Devlin et al
bloom       BLOOM (BigScience 2022)
distilbert  DistilBERT (Sanh et al
electra     ELECTRA (Clark et al
falcon      Falcon (Almazrouei et al
gemma       Gemma 1, 2 and 3 (Gemma team 2024, 2025)
gpt2        GPT-2 (Radford et al
llama       Llama (Touvron et al
mixtral     Mixtral (Jiang et al
modernbert  ModernBERT (Warner et al
neox        GPT-NeoX (Black et al
opt         OPT (Zhang et al
phi3        Phi-3 and Phi-4 (Abdin et al
qwen3_moe   Qwen3-MoE (Qwen team 2025)
roberta     RoBERTa (Liu et al
t5          T5 (Raffel et al
vit         ViT (Dosovitskiy et al
"""

from anyformer.interop.families.albert import ALBERT
from anyformer.interop.families.bart import BART, M2M100, MARIAN, MBART, PEGASUS
from anyformer.interop.families.bert import BERT
from anyformer.interop.families.bloom import BLOOM
from anyformer.interop.families.distilbert import DISTILBERT
from anyformer.interop.families.electra import ELECTRA
from anyformer.interop.families.falcon import FALCON
from anyformer.interop.families.gemma import GEMMA, GEMMA2, GEMMA3
from anyformer.interop.families.gpt2 import GPT2
from anyformer.interop.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from anyformer.interop.families.mixtral import MIXTRAL
from anyformer.interop.families.modernbert import MODERNBERT
from anyformer.interop.families.neox import NEOX
from anyformer.interop.families.opt import OPT
from anyformer.interop.families.phi3 import PHI3
from anyformer.interop.families.qwen3_moe import QWEN3_MOE
from anyformer.interop.families.roberta import ROBERTA, XLM_ROBERTA
from anyformer.interop.families.t5 import MT5, T5
from anyformer.interop.families.vit import VIT
from anyformer.interop.family import Family

_ALL: tuple[Family, ...] = (
    *(GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, NEOX, OPT, BLOOM),
    *(QWEN3_MOE, FALCON, PHI3),
    *(BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, ELECTRA, ALBERT, MODERNBERT, VIT),
    *(T5, MT5, BART, MBART, MARIAN, PEGASUS, M2M100),
)
FAMILIES = {family.kind: family for family in _ALL}
