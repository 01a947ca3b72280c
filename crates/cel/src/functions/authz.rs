//! The authorizer library.

use std::sync::Arc;

use super::{FunctionOp, overload_error};
use crate::authorizer::{AuthorizationAttributes, AuthorizerCheck, Stage};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{LibraryValue, Value};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "path" => |_, args| match args {
            [_, Value::String(path)] if path.trim().is_empty() => {
                Err(EvalError::new("path must not be empty"))
            }
            args => next_stage(args, Stage::Authorizer, Stage::Path, |attributes, path| {
                attributes.path = Some(path)
            }),
        },
        "group" => |_, args| {
            next_stage(args, Stage::Authorizer, Stage::Group, |attributes, group| attributes.group = group)
        },
        "serviceAccount" => |_, args| match args {
            [Value::Library(LibraryValue::Check(check)), Value::String(namespace), Value::String(name)] => {
                if !is_subdomain(name) {
                    return Err(EvalError::new("Invalid service account name"));
                }
                if !is_subdomain(namespace) || namespace.contains('.') {
                    return Err(EvalError::new("Invalid service account namespace"));
                }
                let account = Some((namespace.to_string(), name.to_string()));
                Ok(value(check.next(Stage::Authorizer, |attributes| attributes.service_account = account)))
            }
            _ => overload_error(),
        },
        "resource" => |_, args| match args {
            [_, Value::String(name)] if name.trim().is_empty() => {
                Err(EvalError::new("resource must not be empty"))
            }
            args => {
                next_stage(args, Stage::Group, Stage::Resource, |attributes, name| attributes.resource = name)
            }
        },
        "subresource" => {
            |_, args| with_resource_attribute(args, |attributes, text| attributes.subresource = text)
        }
        "namespace" => {
            |_, args| with_resource_attribute(args, |attributes, text| attributes.namespace = text)
        }
        "name" => |_, args| with_resource_attribute(args, |attributes, text| attributes.name = text),
        "fieldSelector" => {
            |_, args| with_resource_attribute(args, |attributes, text| attributes.field_selector = text)
        }
        "labelSelector" => {
            |_, args| with_resource_attribute(args, |attributes, text| attributes.label_selector = text)
        }
        "check" => |_, args| match args {
            [Value::Library(LibraryValue::Check(check)), Value::String(verb)]
                if matches!(check.stage, Stage::Path | Stage::Resource) =>
            {
                let mut attributes = check.attributes.clone();
                attributes.verb = verb.to_string();
                let decision = check.authorizer.authorize(&attributes);
                Ok(value(check.next(Stage::Decision(decision), |_| {})))
            }
            _ => overload_error(),
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

fn value<'a>(check: Arc<AuthorizerCheck<'a>>) -> Value<'a> {
    Value::Library(LibraryValue::Check(check))
}

fn next_stage<'a>(
    args: &[Value<'a>],
    from: Stage,
    to: Stage,
    change: impl FnOnce(&mut AuthorizationAttributes, String),
) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Check(check)), Value::String(text)] if check.stage == from => {
            Ok(value(check.next(to, |attributes| change(attributes, text.to_string()))))
        }
        _ => overload_error(),
    }
}

fn with_resource_attribute<'a>(
    args: &[Value<'a>],
    change: impl FnOnce(&mut AuthorizationAttributes, String),
) -> EvalResult<'a> {
    next_stage(args, Stage::Resource, Stage::Resource, change)
}

fn decision<'a>(
    args: &[Value<'a>],
    read: impl FnOnce(&crate::authorizer::Decision) -> Value<'a>,
) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Check(check))] => match &check.stage {
            Stage::Decision(decision) => Ok(read(decision)),
            _ => overload_error(),
        },
        _ => overload_error(),
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
