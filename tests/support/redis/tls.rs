//! Certificates made for one test.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// An authority that nobody else knows, and a server's certificate by it for 127.0.0.1 and localhost. All in PEM.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    /// What a client must be given to trust the server.
    pub(crate) root: String,
    pub(super) certificate: String,
    pub(super) key: String,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // A certificate whose issuer had its own name would count as signed by itself.
        authority.distinguished_name.push(DnType::CommonName, "an authority");
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let server = CertificateParams::new(names).unwrap();
        let server = server.signed_by(&key, &authority).unwrap();
        Self { root: authority.pem(), certificate: server.pem(), key: key.serialize_pem() }
    }
}
