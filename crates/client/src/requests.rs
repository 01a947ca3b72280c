//! API requests: typed if the kind is known at compile time, otherwise as JSON values.

use bytes::Bytes;
use http::{Method, Request, header};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::Failure;
use crate::object::{Key, Object, collection_path, object_path};
use crate::{Client, Error};

/// A patch with its type.
pub enum Patch {
    Json(Value),
    Merge(Value),
    Strategic(Value),
    /// Forced server-side apply by this field manager: takes over conflicting fields.
    Apply {
        manager: &'static str,
        object: Value,
    },
}

/// Options of a delete request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeleteOptions {
    /// Precondition: the object has this UID.
    pub uid: Option<String>,
    /// Precondition: the object has this resourceVersion.
    pub resource_version: Option<String>,
    /// `Background`, `Foreground` or `Orphan`.
    pub propagation: Option<&'static str>,
    pub grace_seconds: Option<i64>,
}

impl DeleteOptions {
    /// With a UID precondition, so that another object with the same name is not deleted.
    pub fn uid(uid: &str) -> DeleteOptions {
        DeleteOptions { uid: Some(uid.to_owned()), ..DeleteOptions::default() }
    }

    fn to_value(&self) -> Value {
        let mut options = json!({"kind": "DeleteOptions", "apiVersion": "v1"});
        if let Some(uid) = &self.uid {
            options["preconditions"]["uid"] = json!(uid);
        }
        if let Some(version) = &self.resource_version {
            options["preconditions"]["resourceVersion"] = json!(version);
        }
        if let Some(propagation) = self.propagation {
            options["propagationPolicy"] = json!(propagation);
        }
        if let Some(seconds) = self.grace_seconds {
            options["gracePeriodSeconds"] = json!(seconds);
        }
        options
    }
}

impl Client {
    pub async fn get<T: Object>(&self, key: &Key) -> Result<T, Error> {
        self.execute(Method::GET, &object_path::<T>(key), &[], Bytes::new(), JSON).await
    }

    /// Lists all objects of a kind, in one namespace unless `namespace` is `""`.
    pub async fn list<T: Object>(&self, namespace: &str) -> Result<Vec<T>, Error> {
        #[derive(serde::Deserialize)]
        struct List<T> {
            items: Option<Vec<T>>,
        }
        let path = collection_path::<T>(namespace);
        let list: List<T> = self.execute(Method::GET, &path, &[], Bytes::new(), JSON).await?;
        Ok(list.items.unwrap_or_default())
    }

    pub async fn create<T: Object>(&self, object: &T) -> Result<T, Error> {
        let path = collection_path::<T>(object.namespace());
        self.execute(Method::POST, &path, &[], encode(object)?, JSON).await
    }

    /// Replaces the object. A stale resourceVersion is a conflict.
    pub async fn replace<T: Object>(&self, object: &T) -> Result<T, Error> {
        self.execute(Method::PUT, &object_path::<T>(&object.key()), &[], encode(object)?, JSON).await
    }

    /// Replaces the status of the object. A stale resourceVersion is a conflict.
    pub async fn replace_status<T: Object>(&self, object: &T) -> Result<T, Error> {
        let path = object_path::<T>(&object.key()) + "/status";
        self.execute(Method::PUT, &path, &[], encode(object)?, JSON).await
    }

    pub async fn patch<T: Object>(&self, key: &Key, patch: &Patch) -> Result<T, Error> {
        self.patch_at(&object_path::<T>(key), patch).await
    }

    pub async fn patch_status<T: Object>(&self, key: &Key, patch: &Patch) -> Result<T, Error> {
        self.patch_at(&(object_path::<T>(key) + "/status"), patch).await
    }

    pub async fn delete<T: Object>(&self, key: &Key, options: &DeleteOptions) -> Result<(), Error> {
        self.delete_at(&object_path::<T>(key), options).await
    }

    /// Creates a subresource, such as `binding` or `eviction` of a pod.
    pub async fn create_at<T: Object>(
        &self,
        key: &Key,
        subresource: &str,
        body: &Value,
    ) -> Result<Value, Error> {
        let path = format!("{}/{subresource}", object_path::<T>(key));
        self.request(Method::POST, &path, Some(body)).await
    }

    /// Sends any request, for kinds known at run time only. `path` may contain a query.
    pub async fn request(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, Error> {
        let body = body.map(encode).transpose()?.unwrap_or_default();
        self.execute(method, path, &[], body, JSON).await
    }

    /// Reads the object at `path`. Unknown fields are ignored.
    pub async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.execute(Method::GET, path, &[], Bytes::new(), JSON).await
    }

    /// Patches the object at `path`.
    pub async fn patch_at<T: DeserializeOwned>(&self, path: &str, patch: &Patch) -> Result<T, Error> {
        let (content_type, body) = match patch {
            Patch::Json(body) => ("application/json-patch+json", body),
            Patch::Merge(body) => ("application/merge-patch+json", body),
            Patch::Strategic(body) => ("application/strategic-merge-patch+json", body),
            Patch::Apply { object, .. } => ("application/apply-patch+yaml", object),
        };
        let query: &[(&str, &str)] = match patch {
            Patch::Apply { manager, .. } => &[("fieldManager", manager), ("force", "true")],
            _ => &[],
        };
        self.execute(Method::PATCH, path, query, encode(body)?, content_type).await
    }

    /// Deletes the object or collection at `path`.
    pub async fn delete_at(&self, path: &str, options: &DeleteOptions) -> Result<(), Error> {
        let body = encode(&options.to_value())?;
        let _: serde::de::IgnoredAny = self.execute(Method::DELETE, path, &[], body, JSON).await?;
        Ok(())
    }

    async fn execute<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Bytes,
        content_type: &'static str,
    ) -> Result<T, Error> {
        let request_line = format!("{method} {path}");
        let response = self.exchange(method, path, query, body, content_type).await?;
        serde_json::from_slice(&response).map_err(|source| Error::Decode { request: request_line, source })
    }

    /// Sends a request and returns the response body. Separate from [`Client::execute`], so that it
    /// is compiled once instead of once per type.
    async fn exchange(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, &str)],
        body: Bytes,
        content_type: &'static str,
    ) -> Result<Bytes, Error> {
        let mut uri = path.to_owned();
        for (i, (name, value)) in query.iter().enumerate() {
            uri += &format!("{}{name}={value}", if i == 0 { '?' } else { '&' });
        }
        let request_line = format!("{method} {path}");
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(header::USER_AGENT, &*self.agent)
            .header(header::ACCEPT, JSON)
            .header(header::CONTENT_TYPE, content_type)
            .body(body)
            .map_err(|error| Error::Unreachable(error.into()))?;
        let response = self.connection().send(request).await?;
        if response.status().is_success() {
            return Ok(response.into_body());
        }
        let mut failure: Failure = serde_json::from_slice(response.body()).unwrap_or_default();
        failure.code = response.status().as_u16();
        if failure.message.is_empty() {
            failure.message =
                format!("{request_line}: server returned status {} without a message", response.status());
        }
        Err(Error::Api(Box::new(failure)))
    }
}

const JSON: &str = "application/json";

fn encode(object: &impl serde::Serialize) -> Result<Bytes, Error> {
    serde_json::to_vec(object).map(Bytes::from).map_err(Error::Encode)
}
