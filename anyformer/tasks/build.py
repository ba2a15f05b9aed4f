"""Build a task from its spec."""

from anyformer.data.chat_template import ChatTemplate
from anyformer.data.tokenizer import CHAT, FILE, TextTokenizer
from anyformer.recipe import (
    Actions,
    AnyTask,
    Chat,
    Classify,
    Embed,
    Encoder,
    LanguageModel,
    MaskedLanguageModel,
    Mixture,
    Preferences,
    PrefixLM,
    QuestionAnswering,
    Regress,
    Rewards,
    Seq2Seq,
    SpanCorruption,
    Tag,
    Transcribe,
)
from anyformer.tasks.actions import ActionPrediction
from anyformer.tasks.base import Task
from anyformer.tasks.chat import Conversing
from anyformer.tasks.chat_answers import ChatPreferring, ChatRewardedAnswers
from anyformer.tasks.classify import Classifying
from anyformer.tasks.embed import Embedding
from anyformer.tasks.imported_encoder import Encoding
from anyformer.tasks.lm import LanguageModelling
from anyformer.tasks.mixture import MixedTasks
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.preferences import Preferring
from anyformer.tasks.prefix_lm import PrefixModelling
from anyformer.tasks.regress import Regressing
from anyformer.tasks.rewards import RewardedAnswers
from anyformer.tasks.seq2seq import SequenceToSequence
from anyformer.tasks.span import SpanAnswering
from anyformer.tasks.span_corruption import SpanCorrupting
from anyformer.tasks.tag import Tagging
from anyformer.tasks.transcribe import Transcribing


def build_task(spec: AnyTask, tokenizer: TextTokenizer, source_tokenizer: TextTokenizer | None) -> Task:
    """Return the task that a spec describes, with its tokenizers."""
    template = ChatTemplate.of(tokenizer, f"{FILE}: {CHAT}") if isinstance(spec, Preferences | Rewards | Chat) else None
    match spec:
        case Preferences():
            return Preferring(spec, tokenizer) if template is None else ChatPreferring(spec, template)
        case Rewards():
            return RewardedAnswers(spec, tokenizer) if template is None else ChatRewardedAnswers(spec, template)
        case Seq2Seq():
            return SequenceToSequence(spec, tokenizer, source_tokenizer)
        case Mixture():
            return MixedTasks(spec, tokenizer, source_tokenizer)
        case LanguageModel():
            return LanguageModelling(spec, tokenizer)
        case Chat():
            return Conversing(spec, template)
        case MaskedLanguageModel():
            return MaskedLanguageModelling(spec, tokenizer)
        case SpanCorruption():
            return SpanCorrupting(spec, tokenizer)
        case PrefixLM():
            return PrefixModelling(spec, tokenizer)
        case Classify():
            return Classifying(spec, tokenizer)
        case Regress():
            return Regressing(spec, tokenizer)
        case Embed():
            return Embedding(spec, tokenizer)
        case QuestionAnswering():
            return SpanAnswering(spec, tokenizer)
        case Tag():
            return Tagging(spec, tokenizer)
        case Actions():
            return ActionPrediction(spec, tokenizer)
        case Encoder():
            return Encoding(spec, tokenizer)
        case Transcribe():
            return Transcribing(spec, tokenizer)
