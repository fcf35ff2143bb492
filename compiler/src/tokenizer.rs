//! The compact tokenizer that an executable carries, made of `tokenizer.json`.

use crate::error::Error;
use rcompile_models::{Kind, Model};
use rcompile_runtime::text::{self, TextError};

/// The compact tokenizer, where the model has one.
pub(crate) fn compact(model: &Model) -> Result<Option<Vec<u8>>, Error> {
    let compact = model.tokenizer.as_ref().map(|t| {
        text::compact(&t.json)
            .map_err(|e| rcompile_models::Error::new(kind(&e), "tokenizer.json", "file", "cannot be made compact", "a tokenizer", e))
    });
    Ok(compact.transpose()?)
}

/// What is wrong with a tokenizer or its text, as one of the model directory's errors.
pub(crate) fn kind(error: &TextError) -> Kind {
    match error {
        TextError::Malformed(_) => Kind::Malformed,
        TextError::Disagree(_) => Kind::Disagree,
        TextError::Unsupported(_) => Kind::Unsupported,
        TextError::Failed(_) => Kind::Limit,
    }
}
