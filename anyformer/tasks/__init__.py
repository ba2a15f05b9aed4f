"""Tasks: examples in token ids, loss, metrics and predictions. One module for each task, and what they share.

actions              actions of episodes: behaviour cloning, decision transformer
answer_budgets       maximum numbers of tokens of answers, checks of budgets and stop strings
base                 the protocol of tasks, the call of a model on a batch, checks of lengths
chat                 conversations: loss on the assistant's messages, and answers to the next one
chat_answers         answers of a chat model, in the tasks dpo and grpo
classify             classification of texts or pairs, by one label or several
crf                  linear-chain conditional random fields: loss and Viterbi decoding
dynamic_examples     base of tasks whose examples are drawn from texts (mlm, spans, prefix_lm)
embed                sentence embeddings by contrastive learning (InfoNCE)
environments         Gymnasium, BabyAI and key-to-door: demonstrations and rollouts
generation           text generation: prompts, decoding options, outputs as text
generation_defaults  default options of generation that belong to a run
imported_encoder     predictions of an imported encoder
lm                   language modelling, also after a prefix that sees all of itself
metrics              exact match, F1, spans, correlations, BLEU, chrF, word error rate
mixture              several sequence-to-sequence tasks in one model
mlm                  masked language modelling
output_constraints   constraints on generated text: regex, JSON, choices, phrases
preferences          direct preference optimisation (DPO): one answer preferred to another
regress              regression of texts or pairs
rewards              group-relative policy optimisation (GRPO): rewards of the model's own answers
scoring              log-probabilities of texts, and alternatives for a token
seq2seq              sequence to sequence
sequence_level       base of tasks with one prediction per text or pair (classify, regress, embed); texts with masks
span                 answers to questions, each a span of a text
span_corruption      span corruption (T5)
tag                  tagging of words, by a softmax or a CRF
text_stream          incremental decoding of token ids to text
transcribe           text of a WAV file by an imported speech model
"""
