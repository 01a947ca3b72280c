//! CEL, the expression language of validation rules, admission policies and match conditions, with the
//! functions of Kubernetes v1.36.
//!
//! An [`Env`] declares variables and their types. [`Env::compile`] parses and type-checks an expression
//! and reports errors as cel-go does. The resulting [`Program`] can be estimated (its maximum cost) and
//! evaluated, repeatedly and from several threads. Evaluation never uses more time or memory than its
//! [`Budget`] allows.
//!
//! Upstream: github.com/google/cel-go and `apiserver/pkg/cel`.
//!
//! ```
//! use cel::{Budget, Decl, Env, RUNTIME_BUDGET, Value, Variables};
//! use serde_json::json;
//!
//! let schema = json!({"type": "object", "properties": {"replicas": {"type": "integer"}}});
//! let decl = Decl::from_schema(&schema, false).expect("an object has a declaration");
//! let env = Env::new().variable("self", decl.clone());
//! let program = env.compile("self.replicas <= 5").expect("the expression is fine");
//! assert!(program.estimate().max < 10);
//!
//! let object = json!({"replicas": 7});
//! let variables = Variables::new().with("self", Value::from_declared(&object, &decl));
//! let mut budget = Budget::new(RUNTIME_BUDGET);
//! let value = program.run(&variables, &mut budget).expect("nothing goes wrong");
//! assert_eq!(value.as_bool(), Some(false));
//!
//! let errors = env.compile("self.size > 5").expect_err("there is no such field");
//! assert_eq!(
//!     errors.to_string(),
//!     "ERROR: <input>:1:5: undefined field 'size'\n | self.size > 5\n | ....^"
//! );
//! ```
//!
//! Start reading at [`env`](Env), then follow an expression through `parser`, `check`, `eval` and
//! `functions`. `signatures.txt` is the table of functions. The crate knows schemas but no kinds and
//! does no I/O: authorization checks go through the trait [`Authorizer`].

mod ast;
mod authorizer;
mod check;
mod decl;
mod env;
mod escape;
mod estimate;
mod eval;
mod functions;
mod lexer;
mod parser;
mod signatures;
mod source;
#[cfg(test)]
mod tests;
mod time;
mod types;
mod value;

pub use authorizer::{AuthorizationAttributes, Authorizer, AuthorizerCheck, Decision};
pub use decl::{Decl, Field, ListType};
pub use env::{Env, Program};
pub use escape::{escape, is_reserved, unescape};
pub use estimate::Cost;
pub use eval::{Budget, EvalError, MATCH_CONDITIONS_BUDGET, PER_CALL_LIMIT, RUNTIME_BUDGET, Variables};
pub use functions::compile_regex;
pub use source::{CompileError, Errors};
pub use types::{Object, Type};
pub use value::{Fields, Key, LibraryValue, List, Map, Text, Value};
