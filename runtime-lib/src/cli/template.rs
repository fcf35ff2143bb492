//! The model's chat template, as the executable carries it.
//!
//! In: messages (`role`, `content`). Out: the text that the model continues with its answer.

use std::collections::BTreeMap;

use rcompile_template::{Template, TemplateError, TemplateErrorKind, TemplateInput};
use serde_json::json;

use super::Cx;
use super::error::Failure;
use super::streams::SHORT_INPUT_BYTES;
use crate::area::{MemoryUse, ResourceError, room_for};

/// The model's chat template.
pub(super) struct ChatTemplate<'m> {
    template: Template,
    special_tokens: &'m BTreeMap<String, String>,
}

impl<'m> ChatTemplate<'m> {
    pub(super) fn of(cx: &'m Cx) -> Result<Self, Failure> {
        let no_template = || {
            Failure::new(6, "template", "this model has no chat template").help(if cx.manifest().text.is_some() {
                "use generate -p TEXT without --chat"
            } else {
                "it was built without a tokenizer: use generate --tokens"
            })
        };
        let info = cx.manifest().text.as_ref().ok_or_else(no_template)?;
        let span = info.chat_template.ok_or_else(no_template)?;
        let source = cx.payload.blob(span, "chat template")?;
        let source = std::str::from_utf8(source).map_err(|_| Failure::new(4, "template", "chat template: not UTF-8"))?;
        Ok(Self { template: Template::new(source)?, special_tokens: &info.special_tokens })
    }

    /// The text of a conversation, up to where the next answer begins.
    pub(super) fn render(&self, messages: &[serde_json::Value]) -> Result<String, TemplateError> {
        self.template.render(&TemplateInput {
            messages: messages.to_vec().into(),
            tools: None,
            add_generation_prompt: true,
            special_tokens: self.special_tokens,
            extra: None,
            now: None,
        })
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        let exit = match error.kind {
            TemplateErrorKind::Raised => 2,
            TemplateErrorKind::Limit | TemplateErrorKind::Machine => 7,
            _ => 4,
        };
        let machine = error.kind == TemplateErrorKind::Machine;
        let failure = Self::new(exit, "template", error);
        if machine { failure.help("raise the limit of addresses (ulimit -v), or of threads (ulimit -u)") } else { failure }
    }
}

/// Refuses what is said where the control group has no room for the copies of it that messages and templates make. (A rendering cannot be
/// bounded as other work on texts is: its thread has a stack of which it seldom uses much.)
pub(super) fn admit(said_bytes: usize) -> Result<(), ResourceError> {
    const COPIES: u64 = 8;
    if (said_bytes as u64) < SHORT_INPUT_BYTES { Ok(()) } else { room_for(MemoryUse::Template, COPIES * said_bytes as u64) }
}

/// A message of a conversation.
pub(super) fn message(role: &str, content: &str) -> serde_json::Value {
    json!({"role": role, "content": content})
}

/// The start of a conversation.
pub(super) fn first_messages(system: Option<&str>, user: &str) -> Vec<serde_json::Value> {
    system.map(|text| message("system", text)).into_iter().chain([message("user", user)]).collect()
}
