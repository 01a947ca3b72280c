//! ServiceAccount: what is special about it.

use crate::kind::Kind;

pub struct ServiceAccount;

impl Kind for ServiceAccount {}
