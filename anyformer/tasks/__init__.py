"""Tasks: what examples are in ids, what is lost on them, and how well a model does. One file each.

base                What every task shares
build               the task that a spec describes
classify            Classification
crf                 Linear-chain conditional random fields (Lafferty et al
dynamic_examples    What tasks share whose examples are drawn from texts
embed               Sentence embeddings by contrast
fill_mask           Texts with special tokens written in them by name, such as masks and sentinels, that a model is to
generation          From texts to texts
imported_encoder    What an encoder from elsewhere says of texts
lm                  Language modelling
metrics             Scores of predictions
mixture             A mixture
mlm                 Masked language modelling
output_constraints  What an answer must be, said in text
prefix_lm           Prefix language modelling
regress             Regression
scoring             How likely a model finds texts, and what else it would have said
seq2seq             Sequence to sequence
sequence_level      What tasks share that say one thing of a whole row
span_corruption     Span corruption
tag                 Tagging
text_stream         Ids that come one after the other, as pieces of text
"""
