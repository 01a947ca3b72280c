//! Questions to the authorizer.

use std::sync::Arc;

use super::{Native, no_such_overload};
use crate::authorizer::{Check, Question, Stage};
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::value::{Library, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "path" => |_, args| match args {
            [_, Value::String(path)] if path.trim().is_empty() => {
                Err(Failure::error("path must not be empty"))
            }
            args => step(args, Stage::Authorizer, Stage::Path, |question, path| question.path = Some(path)),
        },
        "group" => {
            |_, args| step(args, Stage::Authorizer, Stage::Group, |question, group| question.group = group)
        }
        "serviceAccount" => |_, args| match args {
            [Value::Library(Library::Check(check)), Value::String(namespace), Value::String(name)] => {
                if !is_subdomain(name) {
                    return Err(Failure::error("Invalid service account name"));
                }
                if !is_subdomain(namespace) || namespace.contains('.') {
                    return Err(Failure::error("Invalid service account namespace"));
                }
                let account = Some((namespace.to_string(), name.to_string()));
                Ok(value(check.next(Stage::Authorizer, |question| question.service_account = account)))
            }
            _ => no_such_overload(),
        },
        "resource" => |_, args| match args {
            [_, Value::String(name)] if name.trim().is_empty() => {
                Err(Failure::error("resource must not be empty"))
            }
            args => step(args, Stage::Group, Stage::Resource, |question, name| question.resource = name),
        },
        "subresource" => |_, args| refine(args, |question, text| question.subresource = text),
        "namespace" => |_, args| refine(args, |question, text| question.namespace = text),
        "name" => |_, args| refine(args, |question, text| question.name = text),
        "fieldSelector" => |_, args| refine(args, |question, text| question.field_selector = text),
        "labelSelector" => |_, args| refine(args, |question, text| question.label_selector = text),
        "check" => |_, args| match args {
            [Value::Library(Library::Check(check)), Value::String(verb)]
                if matches!(check.stage, Stage::Path | Stage::Resource) =>
            {
                let mut question = check.question.clone();
                question.verb = verb.to_string();
                let decision = check.authorizer.authorize(&question);
                Ok(value(check.next(Stage::Decision(decision), |_| {})))
            }
            _ => no_such_overload(),
        },
        "allowed" => |_, args| decision(args, |decision| Value::Bool(decision.allowed)),
        "reason" => |_, args| decision(args, |decision| Value::text(decision.reason.as_str())),
        "errored" => |_, args| decision(args, |decision| Value::Bool(decision.error.is_some())),
        "error" => {
            |_, args| decision(args, |decision| Value::text(decision.error.as_deref().unwrap_or_default()))
        }
        _ => return None,
    })
}

fn value<'a>(check: Arc<Check<'a>>) -> Value<'a> {
    Value::Library(Library::Check(check))
}

fn step<'a>(
    args: &[Value<'a>],
    from: Stage,
    to: Stage,
    change: impl FnOnce(&mut Question, String),
) -> Evaluated<'a> {
    match args {
        [Value::Library(Library::Check(check)), Value::String(text)] if check.stage == from => {
            Ok(value(check.next(to, |question| change(question, text.to_string()))))
        }
        _ => no_such_overload(),
    }
}

fn refine<'a>(args: &[Value<'a>], change: impl FnOnce(&mut Question, String)) -> Evaluated<'a> {
    step(args, Stage::Resource, Stage::Resource, change)
}

fn decision<'a>(
    args: &[Value<'a>],
    read: impl FnOnce(&crate::authorizer::Decision) -> Value<'a>,
) -> Evaluated<'a> {
    match args {
        [Value::Library(Library::Check(check))] => match &check.stage {
            Stage::Decision(decision) => Ok(read(decision)),
            _ => no_such_overload(),
        },
        _ => no_such_overload(),
    }
}

fn is_subdomain(text: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    };
    text.len() <= 253 && text.split('.').all(label)
}
