// A SentencePiece BPE model as tokenizer.json, the format of Hugging Face's tokenizers.
#pragma once

#include <string>

#include "train/sentence_pieces.h"

namespace logitless::train {

// Returns "" where tokenizer.json can give the words of a SentencePiece model, or else what it has
// that this form of the file has not.
std::string fast_tokenizer_refusal(const SentencePieceModel& model);

// The same words for a text as the library gives; but where the text has the name of a special
// word, "</s>", it is that word. The model is one that is not refused.
std::string fast_tokenizer_json(const SentencePieceModel& model);

}  // namespace logitless::train
