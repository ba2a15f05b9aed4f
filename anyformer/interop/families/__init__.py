"""Public model families, in the order of the search for an export.

albert      ALBERT: BERT with shared layers and factorised embeddings
bart        BART, mBART, Marian, Pegasus, M2M-100 and NLLB
bert        BERT
big_bird    BigBird with full attention
block_fields  the fields of blocks that most families have
bloom       BLOOM: ALiBi
clip        CLIP: images and texts
cohere      Command R
decoder_frame  the ends of decoders around their blocks, the fields that most of them have, labels and spans
deberta     DeBERTa-v2 and v3: disentangled attention
deepseek    DeepSeek-V2 and V3: latent attention, shared experts
distilbert  DistilBERT
electra     ELECTRA
encoder_parts  names of layers and heads of the encoders
falcon      Falcon: parallel blocks, multi-query attention
gemma       Gemma 1, 2 and 3
gpt2        GPT-2
gpt_neo     GPT-Neo: local windows
gpt_oss     gpt-oss: sinks, clamped experts
gptj        GPT-J
llama       Llama, Mistral, Qwen2 and Qwen3
longformer  Longformer: windows, separate projections of global tokens
mixtral     Mixtral: Mistral with experts
modernbert  ModernBERT
mpnet       MPNet: RoBERTa with T5's bias
mpt         MPT: ALiBi, no biases
neox        GPT-NeoX and Pythia
olmo        OLMo 2 and 3: norms after sublayers
opt         OPT
phi         Phi-1 and Phi-2
phi3        Phi-3 and Phi-4
qwen_moe    Qwen2-MoE and Qwen3-MoE
qwen3_next  Qwen3-Next: gated DeltaNet and gated attention, experts
roberta     RoBERTa, XLM-R and CamemBERT
smollm3     SmolLM3: layers without positions
stablelm    StableLM 3B and 2
starcoder2  StarCoder2
t5          T5, T5 1.1 and mT5
vit         ViT
whisper     Whisper: speech to text
xglm        XGLM: sinusoidal positions
"""

from anyformer.interop.families.albert import ALBERT
from anyformer.interop.families.bart import BART, M2M100, MARIAN, MBART, PEGASUS
from anyformer.interop.families.bert import BERT
from anyformer.interop.families.big_bird import BIG_BIRD
from anyformer.interop.families.bloom import BLOOM
from anyformer.interop.families.clip import CLIP
from anyformer.interop.families.cohere import COHERE
from anyformer.interop.families.deberta import DEBERTA_V2
from anyformer.interop.families.decoder_frame import with_heads
from anyformer.interop.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from anyformer.interop.families.distilbert import DISTILBERT
from anyformer.interop.families.electra import ELECTRA
from anyformer.interop.families.falcon import FALCON
from anyformer.interop.families.gemma import GEMMA, GEMMA2, GEMMA3
from anyformer.interop.families.gpt2 import GPT2
from anyformer.interop.families.gpt_neo import GPT_NEO
from anyformer.interop.families.gpt_oss import GPT_OSS
from anyformer.interop.families.gptj import GPTJ
from anyformer.interop.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from anyformer.interop.families.longformer import LONGFORMER
from anyformer.interop.families.mixtral import MIXTRAL
from anyformer.interop.families.modernbert import MODERNBERT
from anyformer.interop.families.mpnet import MPNET
from anyformer.interop.families.mpt import MPT
from anyformer.interop.families.neox import NEOX
from anyformer.interop.families.olmo import OLMO2, OLMO3
from anyformer.interop.families.opt import OPT
from anyformer.interop.families.phi import PHI
from anyformer.interop.families.phi3 import PHI3
from anyformer.interop.families.qwen3_next import QWEN3_NEXT
from anyformer.interop.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from anyformer.interop.families.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from anyformer.interop.families.smollm3 import SMOLLM3
from anyformer.interop.families.stablelm import STABLELM
from anyformer.interop.families.starcoder2 import STARCODER2
from anyformer.interop.families.t5 import MT5, T5
from anyformer.interop.families.vit import VIT
from anyformer.interop.families.whisper import WHISPER
from anyformer.interop.families.xglm import XGLM
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
