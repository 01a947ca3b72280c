//! CertificateSigningRequest: what is special about it.

use crate::kind::Kind;

pub struct CertificateSigningRequest;

impl Kind for CertificateSigningRequest {}
