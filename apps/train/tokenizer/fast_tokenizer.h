// Converts a SentencePiece BPE model to tokenizer.json, the format of Hugging Face's tokenizers.
#pragma once

#include <string>

#include "train/tokenizer/sentence_pieces.h"

namespace logitless::train {

// Returns "" where a tokenizer.json can give the same words as the SentencePiece model, or else the
// feature of the model that the format lacks.
std::string fast_tokenizer_refusal(const SentencePieceModel& model);

// Returns a tokenizer.json that gives the same words for a text as the SentencePiece library. The
// exception is the name of a special word in the text, "</s>", which becomes that word. `model` has
// no refusal.
std::string fast_tokenizer_json(const SentencePieceModel& model);

}  // namespace logitless::train
