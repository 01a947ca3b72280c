//! APIService: what is special about it.

use crate::kind::Kind;

pub struct APIService;

impl Kind for APIService {}
