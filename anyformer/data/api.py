"""Names of data that are stable: tokenizers, batches and their plans."""

from anyformer.data.batch import Ragged as Ragged, collate as collate
from anyformer.data.batch_plan import GradualPlan as GradualPlan, plan_packed as plan_packed, plan_padded as plan_padded
from anyformer.data.chat_template import ChatTemplate as ChatTemplate
from anyformer.data.counter_rng import CounterRNG as CounterRNG
from anyformer.data.loader import Cursor as Cursor
from anyformer.data.readers import Rows as Rows
from anyformer.data.tokenizer import train_tokenizer as train_tokenizer
